"""The core of the simulator: devices that follow their streams, and tokens on the edges between tasks.

A *task* is something that is done again and again (the forward of stage 3), once per micro-batch and always in order,
so its n-th execution belongs to its n-th input and no identifiers are needed. Every execution takes one token from each
edge that enters its task and puts one on each edge that leaves it; a token is the time at which it arrives. A device
starts the next task of its stream as soon as it is free and all tokens are there.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..errors import ScheduleError

__all__ = ["Edge", "Graph", "execute", "no_collection"]


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
    """

    source: int
    target: int
    wire: int | None = None
    time: float = 0
    latency: float = 0
    blocking: bool = False
    tokens: int = 0


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
        for number, edge in enumerate(graph.edges):
            self.incoming[edge.target].append((number, edge.time if edge.blocking else 0))
            self.outgoing[edge.source].append((number, edge.wire, edge.time, edge.latency, edge.blocking))
        self.tokens: list[deque[float]] = [deque([0] * edge.tokens) for edge in graph.edges]
        self.wires: dict[int, float] = {edge.wire: 0 for edge in graph.edges if edge.wire is not None}
        # For each edge the device that stands and waits for it.
        self.waiting: list[int | None] = [None] * len(graph.edges)
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
                edge = next(self.graph.edges[e] for e, _ in self.incoming[task] if not self.tokens[e])
                number = sum(other == task for other in stream[: len(done)])
                stuck.append(
                    f"  device {device} stands before {self.graph.describe(task, number)} and waits for "
                    f"{self.graph.describe(edge.source, number - edge.tokens)}"
                )
        if stuck:
            raise ScheduleError("\n".join(["the devices wait for each other for ever:", *stuck[:8]]))
