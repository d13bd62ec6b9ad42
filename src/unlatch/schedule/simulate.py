"""Self-timed simulation: every worker starts its next action as soon as it is free and the message is there.

Times are whatever the costs are: integers and fractions stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import ScheduleError
from .entries import Action, Cost, Kind, Route
from .runs import Streams, resolved, station_devices
from .simulator_engine import execute, message_graph

__all__ = ["UNIT", "Costs", "Link", "Timeline", "simulate", "time_of"]

Costs = Mapping[Kind, float]

#: One unit per forward, input gradient and weight gradient; updates are free.
UNIT: Costs = MappingProxyType({Kind.F: 1, Kind.B: 2, Kind.I: 1, Kind.W: 1, Kind.U: 0})
_BY_CLASS: dict[Cost, float] = {
    "forward": 1,
    "backward": 2,
    "input gradient": 1,
    "weight gradient": 1,
    "update": 0,
    "auxiliary": 1,
    "none": 0,
}


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


def time_of(costs: Costs, kind: Kind) -> float:
    """What an entry of this kind takes: as given, else a unit by its class of cost."""
    return costs[kind] if kind in costs else _BY_CLASS[kind.cost]


def simulate(
    streams: Streams, costs: Costs | Sequence[Costs] = UNIT, links: Link | Sequence[Link] | None = None
) -> Timeline:
    """Run the streams in virtual time.

    **Arguments:**

    - `streams`: what each device does, in order. Several stations may share a device (`streams(..., devices=...)`).
    - `costs`: time of each kind of action, one mapping for all stations or one per station.
    - `links`: one for all borders between neighbouring stations or one per border; by default messages take no time.
      Within a device they never do.

    >>> from .periodic import one_f_one_b_async
    >>> from .runs import streams
    >>> simulate(streams(one_f_one_b_async(2), [1] * 4)).makespan
    15
    """
    streams = resolved(streams)
    stations = len(station_devices(streams))
    each = [costs] * stations if isinstance(costs, Mapping) else costs
    if len(each) != stations:
        raise ScheduleError(f"expected costs for {stations} stations, got {len(each)}")
    if isinstance(links, Sequence) and len(links) != stations - 1:
        raise ScheduleError(f"expected links for {stations - 1} borders, got {len(links)}")

    def carry(route: Route) -> tuple[float, float, bool]:
        _, sender, receiver = route
        link = links[min(sender, receiver)] if isinstance(links, Sequence) else links or Link()
        return link.forward if receiver > sender else link.backward, link.latency, False

    graph, numbers = message_graph(streams, lambda entry: time_of(each[entry.station], entry.kind), carry)
    return Timeline(streams, *execute(graph, numbers))
