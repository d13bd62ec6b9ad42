"""What was expected of the cases of a study before they were run, beside what was found: did the ranking hold?

Two rankings are judged alike. The advisor's goes by its margin; that by delay alone goes by the updates by which the
oldest gradients are late, and is what an advisor has to beat. Correlations are those of ranks: 1 says that what was
expected to lose most did lose most, and so on down. A case whose runs diverged lost most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.study import Study
from ..errors import ConfigError
from ..io.json_file import read_json
from .paired import ENOUGH
from .study import StudyReport
from .study_case import CaseFound

__all__ = ["RANKINGS", "Correlation", "Judged", "correlations", "judged", "kendall", "read_foretold", "spearman"]

_Floats = npt.NDArray[np.float64]

#: Resamples for an interval, and permutations for a chance.
_DRAWS = 1000

#: Number of the file by which cases are ranked, and how it grows with the loss that is expected.
RANKINGS: dict[str, tuple[str, float]] = {"advisor": ("margin", -1.0), "delay alone": ("updates_late", 1.0)}


@dataclass(frozen=True)
class Judged:
    """One case: what was expected, and what was found.

    **Arguments:**

    - `foretold`: the row of the file.
    - `worse`: how much worse than its baseline it was, paired over seeds, in the measure of the study; infinite if runs
      diverged.
    """

    foretold: Mapping[str, Any]
    worse: float


@dataclass(frozen=True)
class Correlation:
    """How well a ranking held.

    **Arguments:**

    - `group`: the optimizer of the cases, or `"all"` for those of all optimizers of which the advisor speaks.
    - `ranking`: one of `RANKINGS`.
    - `spearman`, `kendall`: of what was expected and found.
    - `spearman_interval`, `kendall_interval`: 95 % of what other draws of as many cases would give (bootstrap).
    - `chance`: share of random rankings that do as well, by Spearman's correlation.
    """

    group: str
    ranking: str
    cases: int
    spearman: float
    spearman_interval: tuple[float, float]
    kendall: float
    kendall_interval: tuple[float, float]
    chance: float


def read_foretold(path: Path) -> dict[str, Any] | None:
    """What was written down before the runs; `None` if nothing was."""
    return read_json(path, "file of predictions", ConfigError) if path.is_file() else None


def judged(report: StudyReport, foretold: Mapping[str, Any]) -> list[Judged]:
    """The cases of a file that have results, or diverged beside a baseline that did not; not those changed since.

    **Arguments:** `foretold`: what `read_foretold` gives.
    """
    study, by_label = report.study, {label: case for case in report.cases for label in case.labels}
    asked = {case.label: case for case in study.cases}
    found = []
    for row in foretold["cases"]:
        label = row["case"]
        if label in asked and study.run_of(asked[label], study.seeds[0]).digest == row["digest"]:
            worse = _worse(report, by_label[label])
            if worse is not None:
                found.append(Judged(row, worse))
    return found


def _worse(report: StudyReport, case: CaseFound) -> float | None:
    if report.base_of(case).flaws:
        return None
    if case.missed("diverged"):
        return math.inf
    pairs = report.against(case)
    if pairs is None or report.why_none(case) is not None:
        return None
    return -pairs.mean if _more_is_better(report.study) else pairs.mean


def _more_is_better(study: Study) -> bool:
    return study.measure.endswith("accuracy")


def correlations(cases: Sequence[Judged]) -> list[Correlation]:
    """How well each ranking held, for the cases of each optimizer, then for all.

    An optimizer without three cases that a ranking speaks of and tells apart has no row for it.
    """
    groups = {str(case.foretold["optimizer"]): None for case in cases}
    found = []
    for group in [*groups, "all"]:
        mine = [case for case in cases if _belongs(case, group)]
        for ranking, (number, sign) in RANKINGS.items():
            spoken = [case for case in mine if case.foretold[number] is not None]
            expected = np.array([sign * case.foretold[number] for case in spoken])
            worse = np.array([case.worse for case in spoken])
            if len(spoken) >= ENOUGH and min(len(set(expected)), len(set(worse))) > 1:
                found.append(_correlation(group, ranking, expected, worse))
    return found


def _belongs(case: Judged, group: str) -> bool:
    # Rankings are compared on the same cases.
    return case.foretold["margin"] is not None if group == "all" else case.foretold["optimizer"] == group


def _correlation(group: str, ranking: str, expected: _Floats, worse: _Floats) -> Correlation:
    generator, count = np.random.default_rng(0), len(worse)
    draws = [generator.integers(count, size=count) for _ in range(_DRAWS)]
    here = spearman(expected, worse)
    shuffled = (spearman(expected, generator.permutation(worse)) for _ in range(_DRAWS))
    # The ranking itself is one of the ways to order them, so that no chance is nought.
    as_good = sum(other >= here - 1e-12 for other in shuffled)
    return Correlation(
        group,
        ranking,
        count,
        here,
        _interval(spearman, expected, worse, draws),
        kendall(expected, worse),
        _interval(kendall, expected, worse, draws),
        (as_good + 1) / (_DRAWS + 1),
    )


def _interval(
    measure: Callable[[_Floats, _Floats], float], a: _Floats, b: _Floats, draws: Sequence[npt.NDArray[np.int64]]
) -> tuple[float, float]:
    values = [measure(a[draw], b[draw]) for draw in draws]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def spearman(a: _Floats, b: _Floats) -> float:
    """The correlation of ranks; equal numbers share theirs. Not a number if one of the two does not vary.

    >>> spearman(np.array([1.0, 2.0, 3.0, 9.0]), np.array([1.0, 3.0, 2.0, 4.0]))
    0.8
    """
    x, y = (ranks - ranks.mean() for ranks in (_ranks(a), _ranks(b)))
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size else math.nan


def kendall(a: _Floats, b: _Floats) -> float:
    """tau-b: pairs in the same order less those in the other, over what ties leave of all pairs.

    >>> round(kendall(np.array([1.0, 2.0, 3.0, 9.0]), np.array([1.0, 3.0, 2.0, 4.0])), 4)
    0.6667
    """
    x, y = (np.sign(ranks[:, None] - ranks[None, :]) for ranks in (_ranks(a), _ranks(b)))
    size = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / size if size else math.nan


def _ranks(values: _Floats) -> _Floats:
    """From 1 on; equal numbers have the mean of theirs. Infinite ones may be among them."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    ranks: _Floats = (last - (counts - 1) / 2)[where]
    return ranks
