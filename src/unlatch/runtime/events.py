"""What happened when: one record per action, the same from every executor, and what can be read off them."""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..schedule.entries import Kind

__all__ = ["Event", "Recorder", "bubble", "costs_of_kinds"]


class Event(NamedTuple):
    """One action of one stage: `version` is the stage's version it saw, `bytes` what the stage keeps afterwards."""

    stage: int
    kind: str
    batch: int
    version: int
    start: float
    end: float
    bytes: int


class Recorder:
    """Collects the newest events (a ring, so that long runs stay bounded) and how stale each backward was."""

    def __init__(self, capacity: int = 100_000) -> None:
        self.events: deque[Event] = deque(maxlen=capacity)
        self.pauses: deque[float] = deque(maxlen=capacity)
        #: Time spent, by station and kind of entry, over the whole run.
        self.seconds: dict[int, dict[str, float]] = {}
        self._forward_version: dict[tuple[int, int], int] = {}
        self._behind: dict[int, dict[int, int]] = {}
        self._history: dict[int, deque[int]] = {}

    def add(self, event: Event) -> None:
        """Record one action."""
        self.events.append(event)
        station, kind, _, _, start, end, _ = event
        seconds = self.seconds.get(station)
        if seconds is None:
            seconds = self.seconds[station] = {}
        seconds[kind] = seconds.get(kind, 0.0) + end - start

    def forward(self, station: int, micro: int, version: int) -> None:
        """Note the version that a forward saw."""
        self._forward_version[station, micro] = version

    def gradient(self, station: int, micro: int, version: int) -> None:
        """Note the version that a gradient of the weights meets; of a backward in halves the second counts."""
        seen = self._forward_version.pop((station, micro), None)
        if seen is not None:
            self._behind.setdefault(micro, {})[station] = version - seen
            history = self._history.get(station)
            if history is None:
                history = self._history[station] = deque(maxlen=4096)
            history.append(version - seen)

    def state(self) -> dict[str, Any]:
        """What is known of micro-batches under way."""
        seen = [[*key, version] for key, version in self._forward_version.items()]
        return {"seen": seen, "behind": {micro: dict(late) for micro, late in self._behind.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        self._forward_version = {(station, micro): version for station, micro, version in state["seen"]}
        self._behind = {micro: dict(late) for micro, late in state["behind"].items()}

    def pause(self) -> None:
        """Note that training is interrupted now, for an evaluation or a checkpoint."""
        self.pauses.append(time.perf_counter())

    def behind(self, micro: int) -> dict[int, int]:
        """Updates between forward and backward of a micro-batch, per local stage; told once."""
        return self._behind.pop(micro, {})

    def staleness(self, stage: int) -> float:
        """Mean number of updates between forward and backward, over the newer half of the run.

        The older half contains the warm-up, in which nothing is stale.
        """
        seen = list(self._history.get(stage, ()))
        steady = seen[len(seen) // 2 :]
        return sum(steady) / len(steady) if steady else 0.0


def costs_of_kinds(events: Iterable[Event]) -> dict[str, str]:
    """What each kind of action among them costs as: whoever reads them later may not know the method that made it.

    >>> costs_of_kinds([Event(0, "F", 0, 0, 0.0, 1.0, 0)])
    {'F': 'forward'}
    """
    kinds = {kind: Kind.known(kind) for kind in sorted({str(event.kind) for event in events})}
    return {name: kind.cost for name, kind in kinds.items() if kind is not None}


def bubble(events: Iterable[Event], stages: Iterable[int], pauses: Iterable[float] = ()) -> float:
    """Share of the time between first and last action in which none of `stages` computes.

    **Arguments:** `pauses`: moments at which training was interrupted; the gap around each does not count.

    >>> bubble([Event(0, "F", 0, 0, 0.0, 1.0, 0), Event(0, "B", 0, 0, 3.0, 4.0, 0)], [0])
    0.5
    """
    wanted = set(stages)
    spans = sorted((e.start, e.end) for e in events if e.stage in wanted)
    if not spans:
        return 0.0
    breaks = sorted(pauses)
    idle, reached = 0.0, spans[0][1]
    for start, end in spans[1:]:
        if start > reached and bisect(breaks, start) == bisect(breaks, reached):
            idle += start - reached
        reached = max(reached, end)
    busy = _covered(spans)
    return idle / (idle + busy) if idle + busy > 0 else 0.0


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total, reached = 0.0, spans[0][0]
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
