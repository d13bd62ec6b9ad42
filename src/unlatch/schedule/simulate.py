"""Self-timed simulation: every worker starts its next action as soon as it is free and the message is there.

Because an action's start depends only on actions before it in any executable order, one pass over such an order is
enough; no event queue. Times are whatever the costs are: integers and fractions stay exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import ScheduleError
from .actions import Action, Kind
from .execution import interleave
from .runs import Streams, stage_homes

__all__ = ["UNIT", "Costs", "Link", "Timeline", "simulate"]

Costs = Mapping[Kind, float]

#: One unit per forward, input gradient and weight gradient; updates are free.
UNIT: Costs = MappingProxyType({Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.U: 0})


@dataclass(frozen=True)
class Link:
    """A border between two stages; sending never holds up computing.

    **Arguments:**

    - `latency`: time from the end of the transmission to the arrival.
    - `forward`, `backward`: time that one message occupies its direction of the border.
    """

    latency: float = 0
    forward: float = 0
    backward: float = 0


@dataclass(frozen=True)
class Timeline:
    """When everything happened; all lists have one entry per stream.

    **Arguments:**

    - `streams`: what was simulated.
    - `starts`, `ends`: times, in the order of the streams.
    """

    streams: Streams
    starts: list[list[float]]
    ends: list[list[float]]

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
        """Share of the makespan that the workers worked, on average."""
        available = len(self.streams) * self.makespan
        return sum(self.busy) / available if available else 1.0

    def __iter__(self) -> Iterator[tuple[Action, float, float]]:
        """Yield every action with its start and end, stream by stream."""
        for stream, starts, ends in zip(self.streams, self.starts, self.ends, strict=True):
            yield from zip(stream, starts, ends, strict=True)


def simulate(
    streams: Streams, costs: Costs | Sequence[Costs] = UNIT, links: Link | Sequence[Link] | None = None
) -> Timeline:
    """Run the streams in virtual time.

    **Arguments:**

    - `streams`: what each worker does, in order. Several stages may share a worker (`streams(..., devices=...)`).
    - `costs`: time of each kind of action, one mapping for all stages or one per stage.
    - `links`: one for all borders or one per border; by default messages take no time. Between stages of one worker
      they never do.

    >>> from .rounds import one_f_one_b_async
    >>> from .runs import streams
    >>> simulate(streams(one_f_one_b_async(2), [1] * 4)).makespan
    15
    """
    home = stage_homes(streams)
    stages = len(home)
    durations = _per_stage(costs, stages)
    up, down = _wires(links, home)
    starts: list[list[float]] = [[] for _ in streams]
    ends: list[list[float]] = [[] for _ in streams]
    free: list[float] = [0] * len(streams)
    forwards: list[deque[float]] = [deque() for _ in range(stages)]
    backwards: list[deque[float]] = [deque() for _ in range(stages)]
    for kind, stage, _ in interleave(streams):
        worker = home[stage]
        begin = free[worker]
        inbox: deque[float] | None = None
        if kind is Kind.F:
            inbox = forwards[stage] if stage else None
        elif (kind is Kind.B or kind is Kind.I) and stage < stages - 1:
            inbox = backwards[stage]
        if inbox is not None and (arrival := inbox.popleft()) > begin:
            begin = arrival
        end = free[worker] = begin + durations[stage][kind]
        starts[worker].append(begin)
        ends[worker].append(end)
        if kind is Kind.F:
            if stage < stages - 1:
                forwards[stage + 1].append(up[stage].send(end))
        elif stage and (kind is Kind.B or kind is Kind.I):
            backwards[stage - 1].append(down[stage - 1].send(end))
    return Timeline(streams, starts, ends)


class _Wire:
    """One direction of a border: messages queue for it, then travel."""

    __slots__ = ("free", "latency", "time")

    def __init__(self, time: float, latency: float) -> None:
        self.time, self.latency = time, latency
        self.free: float = 0

    def send(self, ready: float) -> float:
        """Send a message that is ready at `ready`; return its arrival."""
        self.free = max(ready, self.free) + self.time
        return self.free + self.latency


def _per_stage(costs: Costs | Sequence[Costs], stages: int) -> list[dict[Kind, float]]:
    each = [costs] * stages if isinstance(costs, Mapping) else costs
    if len(each) != stages:
        raise ScheduleError(f"expected costs for {stages} stages, got {len(each)}")
    return [dict(one) for one in each]


def _wires(links: Link | Sequence[Link] | None, home: Sequence[int]) -> tuple[list[_Wire], list[_Wire]]:
    borders = len(home) - 1
    each = links if isinstance(links, Sequence) else [links or Link()] * borders
    if len(each) != borders:
        raise ScheduleError(f"expected links for {borders} borders, got {len(each)}")
    local = Link()
    used = [link if home[border] != home[border + 1] else local for border, link in enumerate(each)]
    return [_Wire(u.forward, u.latency) for u in used], [_Wire(u.backward, u.latency) for u in used]
