"""Times that can be compared: taken in turns, in steady state, with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

__all__ = ["WARM", "completions", "interleave", "spread", "steady_seconds"]

#: Steps after a barrier that do not count: pipelines fill, and queues find their usual length.
WARM = 3

T = TypeVar("T")


def interleave(candidates: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure each candidate once per round, for several rounds, so that a slow minute hits all of them alike.

    >>> interleave({"a": lambda: 1, "b": lambda: 2}, 2)
    {'a': [1, 1], 'b': [2, 2]}
    """
    times: dict[str, list[T]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, measure in candidates.items():
            times[name].append(measure())
    return times


def completions(step: Callable[[], object], steps: int, warm: int = WARM) -> list[float]:
    """Do `steps` steps that count after some that do not, and note when each was done, on the machine's clock.

    >>> len(completions(lambda: None, 4))
    7
    """
    ends = []
    for _ in range(warm + steps):
        step()
        ends.append(time.perf_counter())
    return ends


def steady_seconds(ends: Sequence[Sequence[float]], warm: int = WARM) -> float:
    """Seconds per step while all ranks are at work, from the times at which each rank completed its steps.

    The window opens when the last rank has done its warm steps and closes when the first one has done them all:
    before and after it some rank has nothing to do, which says nothing about a long run. In the window every rank has
    its own mean time between completions, hiccups of the machine included; the mean over ranks counts. Ranks without
    completions take no part. The clock of `perf_counter` is the same for all processes of a machine.

    >>> steady_seconds([[1.0, 2.0, 3.0, 4.0, 5.0], [2.5, 3.5, 4.5, 5.5, 9.9]], warm=1)
    1.0
    """
    working = [list(times) for times in ends if times]
    opens, closes = max(times[max(warm, 1) - 1] for times in working), min(times[-1] for times in working)
    spacings = []
    for times in working:
        inside = [moment for moment in times if opens <= moment <= closes]
        if len(inside) < 2:
            raise ValueError(f"the ranks were at work together for {len(inside)} completions only: take more steps")
        spacings.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return statistics.fmean(spacings)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, best and worst.

    >>> spread([3.0, 1.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'max': 3.0, 'repeats': 3}
    """
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}
