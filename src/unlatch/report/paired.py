"""Is one case better than another? Compared seed by seed, since runs of one seed share their luck: weights and order.

The differences of pairs are what counts: their mean, their standard error, their range, and Student's interval, which
is wide for few of them as it should be. Differences that are all the same are not certain: a measure that counts
samples cannot show a smaller spread. Many comparisons at once find something by chance: Holm's rule says what stays.
"""

from __future__ import annotations

import math
import statistics as stats
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["ENOUGH", "Paired", "chance", "holm", "paired", "student"]

#: Fewer pairs than this are no result.
ENOUGH = 3

#: 97.5 % quantiles of Student's distribution with 1 to 30 degrees of freedom.
_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.959964


def student(freedom: int) -> float:
    """How many standard errors a 95 % interval reaches to either side.

    >>> student(2), round(student(60), 3)
    (4.303, 2.0)
    """
    if freedom <= len(_QUANTILES):
        return _QUANTILES[freedom - 1]
    # The expansion around the normal distribution, cut where four digits are right from here on.
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def chance(t: float, freedom: int) -> float:
    """How likely Student's `t` is at least as far from zero, to either side, if there is no difference.

    >>> round(chance(4.303, 2), 4), round(chance(0.0, 5), 4)
    (0.05, 1.0)
    """
    # The finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(angle), 0.0) if odd else (1.0, 0.0)
    for step in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (step - 1) / step
    inside = math.sin(angle) * total
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


def holm(chances: Sequence[float]) -> list[float]:
    """Each chance adjusted for being one of several (Holm): below 0.05, it is beyond chance among all of them.

    >>> [round(adjusted, 3) for adjusted in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    adjusted, least = [0.0] * len(chances), 0.0
    for rank, place in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        least = max(least, min(1.0, chances[place] * (len(chances) - rank)))
        adjusted[place] = least
    return adjusted


@dataclass(frozen=True)
class Paired:
    """Differences of pairs: a case minus the baseline, by seed.

    **Arguments:** `resolution`: the least difference that the measure can show, as one test sample; 0 if not known.
    """

    differences: Mapping[int, float]
    resolution: float = 0.0

    @property
    def seeds(self) -> int:
        """How many pairs."""
        return len(self.differences)

    @property
    def mean(self) -> float:
        """Of the differences."""
        return stats.fmean(self.differences.values())

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest difference."""
        return min(self.differences.values()), max(self.differences.values())

    @property
    def error(self) -> float | None:
        """The standard error of the mean; of one pair there is none.

        At least that of pairs of which a single one differs from the others, by the resolution: no smaller one shows.
        """
        if self.seeds < 2:
            return None
        return max(stats.stdev(self.differences.values()) / math.sqrt(self.seeds), self.resolution / self.seeds)

    @property
    def unresolved(self) -> bool:
        """Whether the spread is below what the measure can show, so that the error is a bound and not a measurement."""
        low, high = self.range
        return self.seeds > 1 and high - low < self.resolution / 2

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the true difference lies with 95 % confidence, if differences of seeds are normally distributed.

        `None` of one pair, and of equal differences of a measure whose resolution is not known.
        """
        if not self.error:
            return None
        reach = student(self.seeds - 1) * self.error
        return self.mean - reach, self.mean + reach

    @property
    def chance(self) -> float | None:
        """How likely such a mean is without any difference; `None` where there is no interval."""
        return chance(self.mean / self.error, self.seeds - 1) if self.error else None

    @property
    def is_result(self) -> bool:
        """Whether there are pairs enough to speak of one."""
        return self.seeds >= ENOUGH

    @property
    def one_sided(self) -> bool:
        """Whether all pairs say the same, which three of them do by chance in one case out of four."""
        low, high = self.range
        return low > 0.0 or high < 0.0

    @property
    def apart(self) -> bool:
        """Whether the difference is more than chance: enough pairs, and zero outside of the interval."""
        interval = self.interval
        return self.is_result and interval is not None and not interval[0] <= 0.0 <= interval[1]


def paired(values: Mapping[int, float], base: Mapping[int, float], resolution: float = 0.0) -> Paired | None:
    """Differences at the seeds that both have; `None` if there are none.

    **Arguments:** `resolution`: as `Paired` has it.

    >>> found = paired({0: 98.0, 1: 97.0, 2: 99.0, 3: 50.0}, {0: 97.0, 1: 97.0, 2: 97.0})
    >>> found.seeds, found.mean, round(found.error, 4), found.apart
    (3, 1.0, 0.5774, False)
    """
    common = [seed for seed in values if seed in base]
    return Paired({seed: values[seed] - base[seed] for seed in common}, resolution) if common else None
