"""The core of the simulator: devices that follow their streams, and tokens on the edges between tasks.

A *task* is something that is done again and again (the forward of stage 3), once per micro-batch and always in order,
so its n-th execution belongs to its n-th input and no identifiers are needed. Every execution takes one token from each
edge that enters its task and puts one on each edge that leaves it; a token is the time at which it arrives. A device
starts the next task of its stream as soon as it is free and all tokens are there.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import ScheduleError
from .entries import Entry, Route
from .runs import Streams, station_devices

__all__ = ["Edge", "Graph", "execute", "message_graph", "no_collection"]


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


@dataclass(frozen=True)
class Edge:
    """A message from one task to another.

    **Arguments:**

    - `source`, `target`: numbers of tasks.
    - `wire`: which wire it takes; messages of one wire go one after the other. `None` within a device.
    - `time`: how long it occupies the wire.
    - `latency`: from the end of the transmission to the arrival.
    - `blocking`: whether sender and receiver can do nothing else during `time`.
    - `tokens`: messages that lie there from the beginning.
    - `queue`: edges with the same name are one queue, which any of their sources fills and any target empties.
    """

    source: int
    target: int
    wire: int | None = None
    time: float = 0
    latency: float = 0
    blocking: bool = False
    tokens: int = 0
    queue: Hashable = None


@dataclass(frozen=True)
class Graph:
    """Tasks by number, with the time that each takes, and the edges between them."""

    times: Sequence[float]
    edges: Sequence[Edge]
    #: How error texts call the n-th execution of a task.
    describe: Callable[[int, int], str] = field(default=lambda task, number: f"execution {number} of task {task}")


def execute(
    graph: Graph, streams: Sequence[Sequence[int]], factors: Sequence[Sequence[float]] | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Run the streams; give the start and the end of everything, in their order.

    **Arguments:**

    - `streams`: for each device the tasks it executes, in order. Each task is on one device.
    - `factors`: for each device, what the time of each execution is multiplied by.

    >>> execute(Graph([2, 3], [Edge(0, 1, wire=0, time=1)]), [[0, 0], [1, 1]])
    ([[0, 2], [3, 6]], [[2, 4], [6, 9]])
    """
    run = _Run(graph, streams)
    ready = list(reversed(range(len(streams))))
    while ready:
        device = ready.pop()
        run.advance(device, ready, None if factors is None else factors[device])
    run.check_finished()
    return run.starts, run.ends


class _Run:
    def __init__(self, graph: Graph, streams: Sequence[Sequence[int]]) -> None:
        self.graph, self.streams = graph, streams
        self.incoming: list[list[tuple[int, float]]] = [[] for _ in graph.times]
        self.outgoing: list[list[tuple[int, int | None, float, float, bool]]] = [[] for _ in graph.times]
        # For each queue, the edge that error texts name.
        self.edges: list[Edge] = []
        numbers: dict[Hashable, int] = {}
        for edge in graph.edges:
            number = len(self.edges) if edge.queue is None else numbers.setdefault(edge.queue, len(self.edges))
            if number == len(self.edges):
                self.edges.append(edge)
            arrives = (number, edge.time if edge.blocking else 0)
            if arrives not in self.incoming[edge.target]:
                self.incoming[edge.target].append(arrives)
            leaves = (number, edge.wire, edge.time, edge.latency, edge.blocking)
            if leaves not in self.outgoing[edge.source]:
                self.outgoing[edge.source].append(leaves)
        self.tokens: list[deque[float]] = [deque([0] * edge.tokens) for edge in self.edges]
        self.wires: dict[int, float] = {edge.wire: 0 for edge in graph.edges if edge.wire is not None}
        # For each queue the device that stands and waits for it.
        self.waiting: list[int | None] = [None] * len(self.edges)
        self.free: list[float] = [0] * len(streams)
        self.starts: list[list[float]] = [[] for _ in streams]
        self.ends: list[list[float]] = [[] for _ in streams]

    def advance(self, device: int, ready: list[int], factors: Sequence[float] | None) -> None:
        """Let a device go on until a token is missing; put on `ready` the devices that its own tokens set going."""
        stream, starts, ends, now = self.streams[device], self.starts[device], self.ends[device], self.free[device]
        times, tokens = self.graph.times, self.tokens
        while len(starts) < len(stream):
            task = stream[len(starts)]
            begin = now
            for edge, receiving in self.incoming[task]:
                if not tokens[edge]:
                    self.waiting[edge] = device
                    self.free[device] = now
                    return
                begin += receiving
            for edge, _ in self.incoming[task]:
                arrival = tokens[edge].popleft()
                if arrival > begin:
                    begin = arrival
            now = begin + (times[task] if factors is None else times[task] * factors[len(starts)])
            starts.append(begin)
            ends.append(now)
            for edge, wire, sending, latency, blocking in self.outgoing[task]:
                arrival = now
                if wire is not None:
                    arrival = self.wires[wire] = max(now, self.wires[wire]) + sending
                    if blocking:
                        now = arrival
                    arrival += latency
                tokens[edge].append(arrival)
                waiter = self.waiting[edge]
                if waiter is not None:
                    self.waiting[edge] = None
                    ready.append(waiter)
        self.free[device] = now

    def check_finished(self) -> None:
        """Raise an error that says who waits for what, if a stream did not come to its end."""
        stuck = []
        for device, (stream, done) in enumerate(zip(self.streams, self.starts, strict=True)):
            if len(done) < len(stream):
                task = stream[len(done)]
                edge = next(self.edges[e] for e, _ in self.incoming[task] if not self.tokens[e])
                number = sum(other == task for other in stream[: len(done)])
                stuck.append(
                    f"  device {device} stands before {self.graph.describe(task, number)} and waits for "
                    f"{self.graph.describe(edge.source, number - edge.tokens)}"
                )
        if stuck:
            raise ScheduleError("\n".join(["the devices wait for each other for ever:", *stuck[:8]]))


def message_graph(
    streams: Streams,
    time: Callable[[Entry], float],
    carry: Callable[[Route], tuple[float, float, bool]],
) -> tuple[Graph, list[list[int]]]:
    """Tasks (one per entry) and edges (one queue per route), and the streams as numbers of tasks.

    **Arguments:**

    - `time`: that an entry takes.
    - `carry`: how long a message of a route occupies its wire, its latency, and whether it holds up both sides; asked
      for routes between devices only.
    """
    home = station_devices(streams)
    numbers: dict[int, int] = {}
    entries: list[Entry] = []
    for stream in streams:
        for action in stream:
            if id(action.entry) not in numbers:
                assert action.entry is not None
                numbers[id(action.entry)] = len(entries)
                entries.append(action.entry)
    takers: dict[Route, list[int]] = {}
    for number, entry in enumerate(entries):
        for route in entry.incoming:
            takers.setdefault(route, []).append(number)
    edges = []
    wires: dict[Route, int] = {}
    for source, entry in enumerate(entries):
        for route in entry.outgoing:
            near = home[route[1]] == home[route[2]]
            occupied, latency, blocking = (0, 0, False) if near else carry(route)
            wire = None if near else wires.setdefault(route, len(wires))
            for target in takers.get(route, []):
                edges.append(Edge(source, target, wire, occupied, latency, blocking, queue=route))
    graph = Graph([time(entry) for entry in entries], edges, lambda task, number: f"{entries[task]}{number}")
    return graph, [[numbers[id(action.entry)] for action in stream] for stream in streams]
