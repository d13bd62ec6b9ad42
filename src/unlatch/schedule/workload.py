"""What a schedule costs: the time that each entry takes, and the bytes of each message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ..errors import ScheduleError
from .entries import Cost, Entry, Kind, Route

__all__ = ["UNIT", "Costs", "Workload"]

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
class Workload:
    """What the stations of a schedule do with one micro-batch.

    **Arguments:**

    - `times`: of each kind of entry, one mapping for all stations or one per station. A kind that is not listed takes a
      unit by its class of cost.
    - `sizes`: bytes of a message, by route or by name alone; what is not listed weighs nothing.
    - `kept`: bytes that a stage keeps of a micro-batch from its forward to its last gradient, one for all or one each.

    >>> work = Workload({Kind.F: 3}, {"forward": 8, ("forward", 1, 2): 2})
    >>> work.time(Entry(Kind.F, 0)), work.time(Entry(Kind.B, 0)), work.bytes(("forward", 0, 1))
    (3, 2, 8)
    """

    times: Costs | Sequence[Costs] = field(default_factory=lambda: UNIT)
    sizes: Mapping[Route | str, float] = field(default_factory=dict)
    kept: float | Sequence[float] = 0

    def time(self, entry: Entry) -> float:
        """What an entry takes."""
        times = self.times if isinstance(self.times, Mapping) else self.times[entry.station]
        return times[entry.kind] if entry.kind in times else _BY_CLASS[entry.kind.cost]

    def bytes(self, route: Route) -> float:
        """The size of one message."""
        return self.sizes[route] if route in self.sizes else self.sizes.get(route[0], 0)

    def kept_bytes(self, stages: int) -> tuple[float, ...]:
        """What each stage keeps."""
        found = (self.kept,) * stages if isinstance(self.kept, int | float) else tuple(self.kept)
        if len(found) != stages:
            raise ScheduleError(f"expected what each of {stages} stages keeps, got {len(found)} numbers")
        return found

    def units(self, entries: Iterable[Entry]) -> Workload:
        """The same with whole units, by class of cost, for everything that takes time at all: for drawings in text."""
        times: dict[int, dict[Kind, float]] = {}
        for entry in entries:
            unit = _BY_CLASS[entry.kind.cost] if self.time(entry) else 0
            times.setdefault(entry.station, {})[entry.kind] = unit
        return Workload([times[station] for station in sorted(times)])

    def check(self, stations: int) -> None:
        """Raise `ScheduleError` unless it is for so many stations."""
        if not isinstance(self.times, Mapping) and len(self.times) != stations:
            raise ScheduleError(f"expected costs for {stations} stations, got {len(self.times)}")
