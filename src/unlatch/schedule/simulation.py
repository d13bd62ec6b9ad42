"""What a simulated run tells: times, idle time, buffers, staleness, bytes. The same for every schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from .entries import Action, Kind, Route, Schedule
from .runs import Streams, resolved, streams
from .simulate import Timeline
from .simulator_engine import execute, no_collection
from .simulator_stages import Machine, StageWork, jitter_factors, message_bytes, stage_graph

__all__ = ["Simulation", "Span", "simulate_schedule", "simulate_streams"]


class Span(NamedTuple):
    """One action on a timeline."""

    device: int
    stage: int
    kind: str
    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A simulated run.

    **Arguments:**

    - `timeline`: when each device did what.
    - `stages`: how many stages (or layers) there are.
    - `kept_bytes`: per stage, what a micro-batch keeps from its forward to the end of its backward.
    - `sent_bytes`: per border (or link), bytes per micro-batch, both ways.
    - `groups`: micro-batches of each update.
    - `delays`: per stage, how many updates late gradients are, where updates are not actions of the timeline.
    """

    timeline: Timeline
    stages: int
    kept_bytes: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    groups: tuple[int, ...]
    delays: tuple[int, ...] | None = None

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return self.timeline.makespan

    @property
    def utilisation(self) -> float:
        """Share of the makespan that the devices worked, on average."""
        return self.timeline.utilisation

    @property
    def bubble(self) -> float:
        """Share of the makespan that the devices were idle, on average."""
        return 1 - self.utilisation

    @cached_property
    def interval(self) -> float:
        """Time per micro-batch in steady state: the middle half of the run, which filling and emptying hardly touch.

        A run of fewer than four updates is taken as a whole.
        """
        if len(self.groups) < 4:
            return self.makespan / sum(self.groups)
        first, last = (len(self.groups) - 1) // 4, (3 * (len(self.groups) - 1)) // 4
        count = sum(self.groups[first + 1 : last + 1])
        before = list(accumulate(self.groups))
        # Where gradients are local, stages need not keep the same pace; the slowest counts.
        return max((ends[before[last] - 1] - ends[before[first] - 1]) / count for ends in self._passes[1])

    @property
    def steady_utilisation(self) -> float:
        """Share of the interval that the devices worked, on average: without filling and emptying."""
        work = sum(self.timeline.busy) / sum(self.groups)
        return min(1.0, work / (len(self.timeline.streams) * self.interval)) if self.interval else 1.0

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches at one time between the start of their forward and their last gradient."""
        return tuple(map(_most_open, *self._passes))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per stage, what the micro-batches in flight keep."""
        return tuple(count * size for count, size in zip(self.in_flight, self.kept_bytes, strict=True))

    @cached_property
    def staleness(self) -> tuple[float, ...]:
        """Per stage, updates between forward and backward of a micro-batch, on average over the second half."""
        if self.delays is not None:
            return self.delays
        behind: list[list[int]] = [[] for _ in range(self.stages)]
        for stream in self.timeline.streams:
            _behind(stream, behind)
        return tuple(_mean(late[len(late) // 2 :]) for late in behind)

    @property
    def bytes(self) -> float:
        """Bytes over all links in the whole run."""
        return sum(self.sent_bytes) * sum(self.groups)

    @cached_property
    def _passes(self) -> tuple[list[list[float]], list[list[float]]]:
        """Per stage and micro-batch, the start of the forward and the end of the last gradient."""
        begun: list[list[float]] = [[] for _ in range(self.stages)]
        ended: list[list[float]] = [[] for _ in range(self.stages)]
        for stream, starts, ends in zip(self.timeline.streams, self.timeline.starts, self.timeline.ends, strict=True):
            for (kind, stage, _), start, end in zip(stream, starts, ends, strict=True):
                if kind is Kind.F:
                    begun[stage].append(start)
                elif kind is Kind.B or kind is Kind.W:
                    ended[stage].append(end)
        return begun, ended

    def spans(self) -> Iterator[Span]:
        """Everything that took time, device by device."""
        rows = zip(self.timeline.streams, self.timeline.starts, self.timeline.ends, strict=True)
        for device, (stream, starts, ends) in enumerate(rows):
            for (kind, stage, batch), start, end in zip(stream, starts, ends, strict=True):
                if end > start:
                    yield Span(device, stage, str(kind), batch, start, end)

    def summary(self) -> dict[str, Any]:
        """All figures as plain numbers."""
        return {
            "devices": len(self.timeline.streams),
            "stages": self.stages,
            "batches": len(self.groups),
            "micro_batches": sum(self.groups),
            "makespan": float(self.makespan),
            "initiation_interval": float(self.interval),
            "bubble": float(self.bubble),
            "utilisation": float(self.utilisation),
            "steady_utilisation": float(self.steady_utilisation),
            "in_flight": list(self.in_flight),
            "peak_bytes": [float(size) for size in self.peak_bytes],
            "staleness": [float(late) for late in self.staleness],
            "bytes": float(self.bytes),
            "border_bytes": [float(size) for size in self.sent_bytes],
        }


def simulate_schedule(
    schedule: Schedule,
    works: Sequence[StageWork] | StageWork,
    *,
    batches: int,
    microbatches: int = 1,
    per_update: int = 1,
    devices: Sequence[int] | None = None,
    machine: Machine | None = None,
) -> Simulation:
    """Simulate a whole run of any schedule.

    **Arguments:**

    - `works`: of each stage, for one micro-batch; or one for all.
    - `batches`, `microbatches`, `per_update`: batches, parts of each, and batches per update.
    - `devices`: for each stage the number of its device; by default every stage has its own.
    - `machine`: speeds, links, jitter.

    >>> from .periodic import one_f_one_b_async
    >>> run = simulate_schedule(one_f_one_b_async(4), StageWork(), batches=40)
    >>> run.makespan, run.interval, run.in_flight
    (129, 3.0, (4, 3, 2, 1))
    """
    each = [works] * schedule.stages if isinstance(works, StageWork) else list(works)
    parts = [microbatches] * batches
    updates = [microbatches * min(per_update, batches - n) for n in range(0, batches, per_update)]
    with no_collection():
        followed = streams(schedule, parts, per_update, devices)
    return simulate_streams(followed, each, updates, machine)


def simulate_streams(
    streams: Streams,
    works: Sequence[StageWork],
    groups: Sequence[int],
    machine: Machine | None = None,
) -> Simulation:
    """Simulate what each device does.

    **Arguments:** `groups`: micro-batches of each update.
    """
    machine = machine or Machine()
    streams = resolved(streams)
    with no_collection():
        graph, numbers = stage_graph(streams, works, machine)
        starts, ends = execute(graph, numbers, jitter_factors(machine, [len(stream) for stream in streams]))
    return Simulation(
        Timeline(streams, starts, ends),
        stages=len(works),
        kept_bytes=tuple(work.kept_bytes for work in works),
        sent_bytes=_border_bytes(streams, works),
        groups=tuple(groups),
    )


def _border_bytes(streams: Streams, works: Sequence[StageWork]) -> tuple[float, ...]:
    """Bytes per micro-batch over each border between neighbouring stages, both ways."""
    routes: set[Route] = {r for stream in streams for a in stream if a.entry for r in a.entry.outgoing}
    sizes = [0.0] * (len(works) - 1)
    for route in routes:
        sizes[min(route[1], route[2])] += message_bytes(route, works)
    return tuple(sizes)


def _most_open(opened: Sequence[float], closed: Sequence[float]) -> int:
    """The most intervals open at one time; one that ends when another begins is closed before."""
    return max((number + 1 - bisect_right(closed, start) for number, start in enumerate(opened)), default=0)


def _behind(stream: Sequence[Action], behind: list[list[int]]) -> None:
    version: dict[int, int] = {}
    seen: dict[int, deque[int]] = {}
    for kind, stage, _ in stream:
        if kind is Kind.F:
            seen.setdefault(stage, deque()).append(version.get(stage, 0))
        elif kind is Kind.B or kind is Kind.I:
            behind[stage].append(version.get(stage, 0) - seen[stage].popleft())
        elif kind is Kind.U:
            version[stage] = version.get(stage, 0) + 1


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
