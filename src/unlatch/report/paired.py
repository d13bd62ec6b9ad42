"""Is one case better than another? Compared seed by seed, since runs of one seed share their luck: weights and order.

The differences of pairs are what counts: their mean, their standard error, their range, and Student's interval, which
is wide for few of them as it should be.
"""

from __future__ import annotations

import math
import statistics as stats
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ENOUGH", "Paired", "paired", "student"]

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


@dataclass(frozen=True)
class Paired:
    """Differences of pairs: a case minus the baseline, by seed."""

    differences: Mapping[int, float]

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
        """The standard error of the mean; of one pair there is none."""
        return stats.stdev(self.differences.values()) / math.sqrt(self.seeds) if self.seeds > 1 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the true difference lies with 95 % confidence, if differences of seeds are normally distributed."""
        if self.error is None:
            return None
        reach = student(self.seeds - 1) * self.error
        return self.mean - reach, self.mean + reach

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


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> Paired | None:
    """Differences at the seeds that both have; `None` if there are none.

    >>> found = paired({0: 98.0, 1: 97.0, 2: 99.0, 3: 50.0}, {0: 97.0, 1: 97.0, 2: 97.0})
    >>> found.seeds, found.mean, round(found.error, 4), found.apart
    (3, 1.0, 0.5774, False)
    """
    common = [seed for seed in values if seed in base]
    return Paired({seed: values[seed] - base[seed] for seed in common}) if common else None
