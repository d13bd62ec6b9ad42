"""What is known of one case of a study: the lines of its runs, one per seed, and what follows from them alone."""

from __future__ import annotations

import statistics as stats
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .paired import ENOUGH

__all__ = ["CaseFound", "Line"]

#: Cores that others may have kept busy while a run was timed.
_QUIET = 0.2
#: What results in single precision can tell apart, relative to their size.
_SINGLE = 2.0**-23
Line = Mapping[str, Any]


@dataclass(frozen=True)
class CaseFound:
    """What is known of one case.

    **Arguments:**

    - `labels`: what it is called; more than one if cases have the same settings.
    - `lines`: of its runs, by seed; the last word on each.
    - `asked`: how many seeds the study asks for.
    - `measure`: the result that counts.
    - `baseline`: the label of the case that it is compared with.
    """

    labels: tuple[str, ...]
    lines: Mapping[int, Line]
    asked: int
    measure: str
    baseline: str

    @property
    def label(self) -> str:
        """All names of it."""
        return " = ".join(self.labels)

    @cached_property
    def values(self) -> dict[int, float]:
        """What counts, by seed, of the runs that came to their end."""
        ended = {seed: line["evaluation"] for seed, line in self.lines.items() if line["status"] == "finished"}
        return {seed: found[self.measure] for seed, found in ended.items() if found.get(self.measure) is not None}

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return stats.fmean(self.values.values()) if self.values else None

    def missed(self, status: str) -> list[int]:
        """Seeds of runs that ended so."""
        return [seed for seed, line in self.lines.items() if line["status"] == status]

    @property
    def flaws(self) -> list[str]:
        """Why its runs are no result however many there are: those that are left would flatter it."""
        found = [f"{len(seeds)} {status}" for status in ("diverged", "failed") if (seeds := self.missed(status))]
        silent = len(self.missed("finished")) - len(self.values)
        return found + ([f"{silent} without a number"] if silent else [])

    @property
    def is_result(self) -> bool:
        """Whether it may be called one: enough seeds, and all that ran came to their end and to a number."""
        return len(self.values) >= ENOUGH and not self.flaws

    @property
    def resolution(self) -> float:
        """The least difference that what counts can show: one sample of a share, else the last digit of a float32."""
        if not self.measure.endswith("accuracy"):
            return _SINGLE * max(map(abs, self.values.values()), default=0.0)
        counts = [self.lines[seed]["evaluation"].get("samples") for seed in self.values]
        return max((1.0 / count for count in counts if count), default=0.0)

    @property
    def evaluated_on(self) -> tuple[Any, ...]:
        """Which samples its numbers are of; empty if its lines do not say."""
        told = (line["settings"]["data"] for line in self.lines.values() if "settings" in line)
        return next(((data.get("name"), data.get("holdout")) for data in told), ())

    def timed(self) -> dict[int, float]:
        """Samples per second of the runs that had the machine to themselves, by seed."""
        return {
            seed: line["samples_per_second"]
            for seed, line in self.lines.items()
            if line.get("samples_per_second") and line["jobs"] == 1 and line["others_busy"] <= _QUIET
        }

    def per_stage(self, name: str, over: Callable[[Iterable[float]], float]) -> tuple[float, ...]:
        """A number of each stage, taken together over seeds."""
        columns = zip(*(line["stages"] for line in self.lines.values() if line.get("stages")), strict=False)
        found = [[stage[name] for stage in column if stage.get(name) is not None] for column in columns]
        return tuple(over(column) for column in found if column)

    def cosines(self) -> tuple[float, ...]:
        """Of each stage's gradient to that of backpropagation at the weights it is applied to; empty if not probed."""
        return tuple(stats.fmean(value for _, value in points) for points in self.cosine_series().values())

    def cosine_series(self) -> dict[str, list[list[float]]]:
        """The same over the updates, means over seeds, by stage."""
        found: dict[int, dict[int, list[float]]] = {}
        for line in self.lines.values():
            for one in line.get("gradients") or ():
                if one["reference"] == "current":
                    by_update = found.setdefault(one["stage"], {})
                    for update, cosine in zip(one["update"], one["cosine"], strict=True):
                        by_update.setdefault(update, []).append(cosine)
        return {
            f"stage {stage}": [[update, stats.fmean(values)] for update, values in sorted(by_update.items())]
            for stage, by_update in sorted(found.items())
        }

    def curve(self, name: str) -> list[list[float]]:
        """Epoch, mean, least and most of a number over the epochs."""
        by_epoch: dict[int, list[float]] = {}
        for line in self.lines.values():
            for point in line.get("curve", ()):
                if point.get(name) is not None:
                    by_epoch.setdefault(int(point["epoch"]), []).append(point[name])
        return [[epoch, stats.fmean(found), min(found), max(found)] for epoch, found in sorted(by_epoch.items())]

    @cached_property
    def trace(self) -> tuple[Any, ...]:
        """All that its runs computed, for telling whether two cases are the same computation under two settings."""
        timeless = ({name: point[name] for name in point if name != "samples_per_second"} for point in self._points())
        return tuple(tuple(sorted(point.items(), key=lambda item: item[0])) for point in timeless)

    def _points(self) -> Iterable[Mapping[str, Any]]:
        return (point | {"seed": seed} for seed in sorted(self.lines) for point in self.lines[seed].get("curve", ()))
