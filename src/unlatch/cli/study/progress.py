"""How far a study is: a bar where it can move, a line per run where it cannot; and the time that is left."""

from __future__ import annotations

import statistics as stats
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ...config.study import PlannedRun

__all__ = ["StudyProgress", "duration_text", "time_left"]


class StudyProgress:
    """Shows the runs of a study as they end.

    **Arguments:** `known`: lines of earlier runs, by whose times those to come are estimated.
    """

    def __init__(self, console: Console, missing: Sequence[PlannedRun], known: Sequence[Mapping[str, Any]], jobs: int):
        self._console, self._missing, self._jobs = console, list(missing), jobs
        self._known, self._total = list(known), len(missing)
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task(self._left(), total=self._total)

    def __enter__(self) -> StudyProgress:
        self._begun = time.monotonic()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, row: Mapping[str, Any]) -> None:
        """Say what came of a run."""
        self._known.append(row)
        self._missing = [run for run in self._missing if run.digest != row["digest"]]
        number = self._total - len(self._missing)
        left = f", {self._left()}" if self._bar is None and self._missing else ""
        text = f"{number}/{self._total}  {row['label']}, seed {row['seed']}: {_outcome(row)}{left}"
        self._console.print(text, highlight=False, markup=False)
        if self._bar is not None:
            self._bar.update(self._task, completed=number, description=self._left())

    def _left(self) -> str:
        seconds = time_left(self._missing, self._known)
        return "time left unknown" if seconds is None else f"about {duration_text(seconds / self._jobs)} left"


def time_left(missing: Sequence[PlannedRun], known: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds of runs one after the other: each as long as other seeds of its case, else as the mean of all.

    >>> time_left([], [])
    0.0
    """
    times: dict[str, list[float]] = {}
    for row in known:
        if "seconds" in row:
            times.setdefault(row["label"], []).append(row["seconds"])
    if missing and not times:
        return None
    usual = stats.fmean(seconds for found in times.values() for seconds in found) if times else 0.0
    return float(sum(stats.fmean(times[run.label]) if run.label in times else usual for run in missing))


def duration_text(seconds: float) -> str:
    """Seconds in words.

    >>> duration_text(42), duration_text(600), duration_text(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _outcome(row: Mapping[str, Any]) -> str:
    if row["status"] != "finished":
        return f"{row['status']}: {row['reason']}"
    results = [f"{name} {value:.4f}" for name, value in row["evaluation"].items() if name != "samples"]
    return f"{', '.join(results)} in {duration_text(row['seconds'])}"
