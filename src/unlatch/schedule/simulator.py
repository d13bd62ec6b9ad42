"""Self-timed simulation: every device starts its next action as soon as it is free and all messages are there.

What an entry does is a *task*. It is done again and again, always in order, and so are the messages of a route: the
n-th one taken is the n-th one given, and no identifiers are needed. Each execution takes a token from every queue that
its entry takes messages from and puts one into every queue that it gives to; a token is the time of its arrival. Times
are whatever the costs are: integers and fractions stay exact.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import ScheduleError
from .entries import Action, Entry, Route
from .machine import Machine
from .runs import Streams, resolved, station_devices
from .workload import Workload

__all__ = ["Sent", "Timeline", "no_collection", "simulate"]


class Sent(NamedTuple):
    """Messages of one route in a whole run."""

    messages: int
    bytes: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened; all lists have one entry per stream.

    **Arguments:**

    - `streams`: what was simulated.
    - `starts`, `ends`: times, in the order of the streams.
    - `sent`: what went from device to device.
    """

    streams: Streams
    starts: list[list[float]]
    ends: list[list[float]]
    sent: Mapping[Route, Sent] = field(default_factory=dict)

    @property
    def makespan(self) -> float:
        """End of the last action."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def spans(self) -> list[float]:
        """From the start of the first to the end of the last action."""
        return [ends[-1] - starts[0] if ends else 0 for starts, ends in zip(self.starts, self.ends, strict=True)]

    @property
    def busy(self) -> list[float]:
        """Time spent working."""
        return [sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True)]

    @property
    def bubbles(self) -> list[float]:
        """Idle time within the span."""
        return [span - busy for span, busy in zip(self.spans, self.busy, strict=True)]

    @property
    def utilisation(self) -> float:
        """Share of the makespan that the devices worked, on average."""
        available = len(self.streams) * self.makespan
        return sum(self.busy) / available if available else 1.0

    def __iter__(self) -> Iterator[tuple[Action, float, float]]:
        """Yield every action with its start and end, stream by stream."""
        for stream, starts, ends in zip(self.streams, self.starts, self.ends, strict=True):
            yield from zip(stream, starts, ends, strict=True)


def simulate(streams: Streams, workload: Workload | None = None, machine: Machine | None = None) -> Timeline:
    """Run the streams in virtual time.

    **Arguments:**

    - `streams`: what each device does, in order. Several stations may share a device (`streams(..., devices=...)`).
    - `workload`: times and bytes; units by default.
    - `machine`: speeds, links, jitter; by default messages take no time. Within a device they never do.

    >>> from .periodic import one_f_one_b_async
    >>> from .runs import streams
    >>> simulate(streams(one_f_one_b_async(2), [1] * 4)).makespan
    15
    """
    with no_collection():
        run = _Run(resolved(streams), workload or Workload(), machine or Machine())
        run.execute()
        return Timeline(run.streams, run.starts, run.ends, run.sent())


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector: millions of small tuples without cycles make it search in vain again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Give(NamedTuple):
    """What an execution does with one message: `wire` is `None` within a device."""

    queue: int
    wire: tuple[int, int] | None
    sending: float
    latency: float
    blocking: bool


class _Run:
    def __init__(self, streams: Streams, workload: Workload, machine: Machine) -> None:
        self.streams, self.workload = streams, workload
        self.devices = station_devices(streams)
        workload.check(len(self.devices))
        machine.check(len(self.devices), len(streams))
        numbers: dict[int, int] = {}
        self.entries: list[Entry] = []
        for stream in streams:
            for action in stream:
                if id(action.entry) not in numbers:
                    assert action.entry is not None
                    numbers[id(action.entry)] = len(self.entries)
                    self.entries.append(action.entry)
        self.tasks = [[numbers[id(action.entry)] for action in stream] for stream in streams]
        self.times = [machine.time(workload.time(e), self.devices[e.station], e.kind.cost) for e in self.entries]
        self.factors = machine.jitter_factors([len(stream) for stream in streams])
        self._connect(machine)
        self.free: list[float] = [0] * len(streams)
        self.starts: list[list[float]] = [[] for _ in streams]
        self.ends: list[list[float]] = [[] for _ in streams]

    def _connect(self, machine: Machine) -> None:
        """Make a queue for each route, and say what the tasks take from them and give to them."""
        #: For each queue, the first task that fills it.
        self.givers: dict[int, int] = {}
        queues: dict[Route, int] = {}
        holds_up: dict[Route, float] = {}
        self.gives: list[list[_Give]] = []
        self.wires: dict[tuple[int, int], float] = {}
        for number, entry in enumerate(self.entries):
            given = []
            for route in entry.outgoing:
                queue = queues.setdefault(route, len(queues))
                self.givers.setdefault(queue, number)
                wire = self._wire(route)
                if wire is None:
                    given.append(_Give(queue, None, 0, 0, False))
                    continue
                link = machine.link(route)
                sending = link.sending(self.workload.bytes(route))
                given.append(_Give(queue, wire, sending, link.latency, not link.overlapped))
                self.wires[wire] = 0
                holds_up[route] = 0 if link.overlapped else sending
            self.gives.append(given)
        # What nobody gives makes a queue that stays empty, which `execute` finds out.
        self.takes = [
            [(queues.setdefault(route, len(queues)), holds_up.get(route, 0)) for route in entry.incoming]
            for entry in self.entries
        ]
        self.routes = list(queues)
        self.tokens: list[deque[float]] = [deque() for _ in queues]
        # For each queue the device that stands and waits for it.
        self.waiting: list[int | None] = [None] * len(queues)

    def _wire(self, route: Route) -> tuple[int, int] | None:
        _, sender, receiver = route
        wire = self.devices[sender], self.devices[receiver]
        return None if wire[0] == wire[1] else wire

    def execute(self) -> None:
        """Go on until nobody can; it is an error if anything is left."""
        ready = list(reversed(range(len(self.streams))))
        while ready:
            device = ready.pop()
            self._advance(device, ready, None if self.factors is None else self.factors[device])
        self._check_finished()

    def _advance(self, device: int, ready: list[int], factors: Sequence[float] | None) -> None:
        """Let a device go on until a token is missing; put on `ready` the devices that its own tokens set going."""
        stream, starts, ends, now = self.tasks[device], self.starts[device], self.ends[device], self.free[device]
        times, tokens, takes, gives = self.times, self.tokens, self.takes, self.gives
        while len(starts) < len(stream):
            task = stream[len(starts)]
            begin = now
            for queue, receiving in takes[task]:
                if not tokens[queue]:
                    self.waiting[queue] = device
                    self.free[device] = now
                    return
                begin += receiving
            for queue, _ in takes[task]:
                arrival = tokens[queue].popleft()
                if arrival > begin:
                    begin = arrival
            now = begin + (times[task] if factors is None else times[task] * factors[len(starts)])
            starts.append(begin)
            ends.append(now)
            for queue, wire, sending, latency, blocking in gives[task]:
                arrival = now
                if wire is not None:
                    arrival = self.wires[wire] = max(now, self.wires[wire]) + sending
                    if blocking:
                        now = arrival
                    arrival += latency
                tokens[queue].append(arrival)
                waiter = self.waiting[queue]
                if waiter is not None:
                    self.waiting[queue] = None
                    ready.append(waiter)
        self.free[device] = now

    def _check_finished(self) -> None:
        stuck = []
        for device, (stream, done) in enumerate(zip(self.streams, self.starts, strict=True)):
            if len(done) < len(stream):
                task = self.tasks[device][len(done)]
                queue = next(queue for queue, _ in self.takes[task] if not self.tokens[queue])
                name, sender, _ = self.routes[queue]
                action = stream[len(done)]
                giver = f"{self.entries[self.givers[queue]]}{action.batch}" if queue in self.givers else "nobody"
                stuck.append(
                    f"  device {device} stands before {action} and waits for {giver} (the message {name!r} of station "
                    f"{sender})"
                )
        if stuck:
            raise ScheduleError("\n".join(["the devices wait for each other for ever:", *stuck[:8]]))

    def sent(self) -> dict[Route, Sent]:
        """Messages between devices."""
        done = [0] * len(self.entries)
        for stream in self.tasks:
            for task, count in Counter(stream).items():
                done[task] += count
        found: Counter[Route] = Counter()
        for entry, count in zip(self.entries, done, strict=True):
            for route in entry.outgoing:
                if self._wire(route) is not None:
                    found[route] += count
        return {route: Sent(count, count * self.workload.bytes(route)) for route, count in found.items()}
