"""What a simulated run tells: times, idle time, buffers, staleness, bytes. The same for every schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

from .bulk import bulk, suits
from .entries import Cost, Route, Schedule
from .machine import Machine
from .runs import Streams, streams
from .simulator import Sent, Timeline, no_collection, simulate
from .workload import Workload

__all__ = ["BULK", "Costed", "Simulation", "Span", "simulate_schedule"]

#: Actions from which on a run is simulated in bulk, if it can be.
BULK = 100_000

_GRADIENTS: tuple[Cost, ...] = ("backward", "weight gradient")


class Span(NamedTuple):
    """One action on a timeline."""

    device: int
    stage: int
    kind: str
    batch: int
    start: float
    end: float


class _Figures(Protocol):
    """What a run comes to, whether its actions were followed one by one or not."""

    @property
    def makespan(self) -> float: ...
    @property
    def busy(self) -> list[float]: ...
    @property
    def interval(self) -> float: ...
    @property
    def in_flight(self) -> tuple[int, ...]: ...
    @property
    def staleness(self) -> tuple[float, ...]: ...
    @property
    def sent(self) -> Mapping[Route, Sent]: ...


@dataclass(frozen=True)
class _Followed:
    """Figures of a run from the times of all its actions; each is counted when it is asked for."""

    timeline: Timeline
    stages: int
    groups: tuple[int, ...]

    @property
    def makespan(self) -> float:
        return self.timeline.makespan

    @property
    def busy(self) -> list[float]:
        return self.timeline.busy

    @property
    def sent(self) -> Mapping[Route, Sent]:
        return self.timeline.sent

    @cached_property
    def interval(self) -> float:
        if len(self.groups) < 4:
            return self.makespan / sum(self.groups)
        first, last = (len(self.groups) - 1) // 4, (3 * (len(self.groups) - 1)) // 4
        count = sum(self.groups[first + 1 : last + 1])
        before = list(accumulate(self.groups))
        # Where gradients are local, stages need not keep the same pace; the slowest counts.
        return max(
            (ends[before[last] - 1] - ends[before[first] - 1]) / count
            for ends in self._passes[1]
            if len(ends) == sum(self.groups)
        )

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        return tuple(map(_most_open, *self._passes))

    @cached_property
    def staleness(self) -> tuple[float, ...]:
        return tuple(_mean(late[len(late) // 2 :]) for late in _behind(self.timeline.streams, self.stages))

    @cached_property
    def _passes(self) -> tuple[list[list[float]], list[list[float]]]:
        """Per stage and micro-batch, the start of the forward and the end of the last gradient."""
        begun: list[list[float]] = [[] for _ in range(self.stages)]
        ended: list[list[float]] = [[] for _ in range(self.stages)]
        stages = self.stages
        for stream, starts, ends in zip(self.timeline.streams, self.timeline.starts, self.timeline.ends, strict=True):
            for (kind, station, _), start, end in zip(stream, starts, ends, strict=True):
                if station < stages:
                    cost = kind.cost
                    if cost == "forward":
                        begun[station].append(start)
                    elif cost in _GRADIENTS:
                        ended[station].append(end)
        return begun, ended


@dataclass(frozen=True)
class Simulation:
    """A simulated run.

    **Arguments:**

    - `figures`: what it came to.
    - `stages`: how many stages (or layers) there are. Stations count them first; further ones help them elsewhere.
    - `kept_bytes`: per stage, what a micro-batch keeps from its forward to its last gradient.
    - `devices`: for each station the number of its device.
    - `groups`: micro-batches of each update.
    - `follow`: makes the list of all actions, for whoever wants to see them.
    - `owners`: for each station the stage it works for; by default its own.
    """

    figures: _Figures
    stages: int
    kept_bytes: tuple[float, ...]
    devices: tuple[int, ...]
    groups: tuple[int, ...]
    follow: Callable[[], Timeline]
    owners: Sequence[int] | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """When each device did what. A run of millions of actions makes this list when it is first asked for."""
        return self.follow()

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return self.figures.makespan

    @property
    def busy(self) -> list[float]:
        """Time that each device spent working."""
        return self.figures.busy

    @property
    def utilisation(self) -> float:
        """Share of the makespan that the devices worked, on average."""
        available = len(self.busy) * self.makespan
        return sum(self.busy) / available if available else 1.0

    @property
    def bubble(self) -> float:
        """Share of the makespan that the devices were idle, on average."""
        return 1 - self.utilisation

    @property
    def interval(self) -> float:
        """Time per micro-batch in steady state: the middle half of the run, which filling and emptying hardly touch.

        A run of fewer than four updates is taken as a whole.
        """
        return self.figures.interval

    @property
    def steady_utilisation(self) -> float:
        """Share of the interval that the devices worked, on average: without filling and emptying."""
        work = sum(self.busy) / sum(self.groups)
        return min(1.0, work / (len(self.busy) * self.interval)) if self.interval else 1.0

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Per stage, the most micro-batches at one time between the start of their forward and their last gradient."""
        return self.figures.in_flight

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per stage, what the micro-batches in flight keep."""
        return tuple(count * size for count, size in zip(self.in_flight, self.kept_bytes, strict=True))

    @property
    def staleness(self) -> tuple[float, ...]:
        """Per stage, updates between forward and last gradient of a micro-batch, on average over the second half."""
        return self.figures.staleness

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], float]:
        """Bytes per micro-batch between each two devices that talk to each other, both ways."""
        found: dict[tuple[int, int], float] = {}
        for (_, sender, receiver), sent in sorted(self.figures.sent.items()):
            low, high = sorted((self.devices[sender], self.devices[receiver]))
            found[low, high] = found.get((low, high), 0) + sent.bytes
        return {link: found[link] / sum(self.groups) for link in sorted(found)}

    @property
    def bytes(self) -> float:
        """Bytes over all links in the whole run."""
        return sum(sent.bytes for sent in self.figures.sent.values())

    @property
    def messages(self) -> int:
        """Messages over all links in the whole run."""
        return sum(sent.messages for sent in self.figures.sent.values())

    def spans(self) -> Iterator[Span]:
        """Everything that took time, device by device."""
        owners = self.owners or range(len(self.devices))
        rows = zip(self.timeline.streams, self.timeline.starts, self.timeline.ends, strict=True)
        for device, (stream, starts, ends) in enumerate(rows):
            for (kind, station, batch), start, end in zip(stream, starts, ends, strict=True):
                if end > start:
                    yield Span(device, owners[station], str(kind), batch, start, end)

    def summary(self) -> dict[str, Any]:
        """All figures as plain numbers."""
        return {
            "devices": len(self.busy),
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
            "messages": self.messages,
            "bytes": float(self.bytes),
            "link_bytes": [float(size) for size in self.link_bytes.values()],
        }


def simulate_schedule(
    schedule: Schedule,
    workload: Workload | None = None,
    *,
    batches: int,
    microbatches: int = 1,
    per_update: int = 1,
    devices: Sequence[int] | None = None,
    device_count: int | None = None,
    owners: Sequence[int] | None = None,
    machine: Machine | None = None,
) -> Simulation:
    """Simulate a whole run of any schedule.

    **Arguments:**

    - `workload`: times and bytes for one micro-batch; units by default.
    - `batches`, `microbatches`, `per_update`: batches, parts of each, and batches per update.
    - `devices`: for each station the number of its device; by default every station has its own.
    - `device_count`: how many there are, where the last ones have nothing to do.
    - `owners`: for each station the stage it works for; by default its own.
    - `machine`: speeds, links, jitter.

    >>> from .periodic import one_f_one_b_async
    >>> run = simulate_schedule(one_f_one_b_async(4), batches=40)
    >>> run.makespan, run.interval, run.in_flight
    (129, 3.0, (4, 3, 2, 1))
    """
    workload, machine = workload or Workload(), machine or Machine()
    homes = tuple(devices or range(schedule.stations))
    count = max(1 + max(homes), device_count or 0)

    def follow() -> Timeline:
        with no_collection():
            followed = streams(schedule, [microbatches] * batches, per_update, homes)
            followed += [[] for _ in range(count - len(followed))]
        return simulate(followed, workload, machine)

    groups = tuple(microbatches * min(per_update, batches - n) for n in range(0, batches, per_update))
    figures: _Figures | None = None
    if len(schedule.entries) * batches * microbatches >= BULK:
        machine.check(len(homes), count)
        workload.check(len(homes))
        figures = bulk(
            schedule,
            workload,
            homes,
            batches=batches,
            microbatches=microbatches,
            per_update=per_update,
            machine=machine,
            device_count=count,
        )
    if figures is None:
        timeline = follow()
        figures, follow = _Followed(timeline, schedule.stages, groups), partial(_itself, timeline)
    return Simulation(
        figures,
        stages=schedule.stages,
        kept_bytes=workload.kept_bytes(schedule.stages),
        devices=homes,
        groups=groups,
        follow=follow,
        owners=owners,
    )


def _itself(timeline: Timeline) -> Timeline:
    return timeline


@dataclass(frozen=True)
class Costed:
    """A schedule with what it costs and where its stations are; arguments as in `simulate_schedule`."""

    schedule: Schedule
    workload: Workload
    devices: Sequence[int] | None = None
    device_count: int | None = None
    owners: Sequence[int] | None = None

    def in_bulk(self, batches: int, per_update: int, machine: Machine) -> bool:
        """Whether a large run needs no list of its actions."""
        return suits(self.schedule, self.devices or range(self.schedule.stations), batches, per_update, machine)

    def simulate(
        self, batches: int, microbatches: int = 1, per_update: int = 1, machine: Machine | None = None
    ) -> Simulation:
        """Run it in virtual time."""
        return simulate_schedule(
            self.schedule,
            self.workload,
            batches=batches,
            microbatches=microbatches,
            per_update=per_update,
            devices=self.devices,
            device_count=self.device_count,
            owners=self.owners,
            machine=machine,
        )


def _most_open(opened: Sequence[float], closed: Sequence[float]) -> int:
    """The most intervals open at one time; one that ends when another begins is closed before."""
    return max((number + 1 - bisect_right(closed, start) for number, start in enumerate(opened)), default=0)


def _behind(streams: Streams, stages: int) -> list[list[int]]:
    """Per stage, the updates between the forward and the last gradient of each micro-batch."""
    behind: list[list[int]] = [[] for _ in range(stages)]
    version = [0] * stages
    seen: list[deque[int]] = [deque() for _ in range(stages)]
    for kind, station, _ in chain.from_iterable(streams):
        if station < stages:
            cost = kind.cost
            if cost == "forward":
                seen[station].append(version[station])
            elif cost in _GRADIENTS:
                behind[station].append(version[station] - seen[station].popleft())
            elif cost == "update":
                version[station] += 1
    return behind


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0
