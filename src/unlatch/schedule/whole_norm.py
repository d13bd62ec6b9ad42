"""Flushed schedules in which all stages know the norm of the whole gradient before they update.

When its gradients are complete, each station adds the square of its norm to what comes from above and hands the sum
down; the lowest one takes the root and hands it up. Then everybody updates. Under a schedule that flushes, the stations
would be idle at that time; one that does not flush would have to wait, so there is no such form of it.

    Q    down  squares of the norms added up         takes and gives squares
    Q+   up    the norm of all                       takes and gives norm
    U    up    update
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ..errors import ScheduleError
from .entries import Entry, Kind, Port, Schedule

__all__ = ["ADD_SQUARES", "TELL_NORM", "WholeNorm"]

ADD_SQUARES = Kind("Q")
TELL_NORM = Kind("Q+")
_SQUARES, _NORM = "squares", "norm"


@dataclass(frozen=True)
class WholeNorm(Schedule):
    """A flushed schedule with the norm of the whole gradient told to all stations before each update.

    **Arguments:** `base`: the schedule itself.

    >>> from .flushed import Sequential
    >>> from .runs import unroll
    >>> " ".join(map(str, unroll(WholeNorm(Sequential(2)), [1])))
    '0F0 1F0 1B0 0B0 1Q0 0Q0 0Q+0 0U0 1Q+0 1U0'
    """

    base: Schedule

    flushes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.base.flushes:
            raise ScheduleError(
                f"{type(self.base).__name__} updates stages at different times, so the norm of the whole gradient is "
                "never known: expected a schedule that flushes"
            )

    @property
    def stages(self) -> int:  # type: ignore[override]
        """How many stages of the network it is for."""
        return self.base.stages

    @cached_property
    def entries(self) -> tuple[Entry, ...]:  # type: ignore[override]
        """All entries; those of an update in the order in which they are done."""
        return (*(self.base.entries[number] for number in self._kept), *self._closing())

    @cached_property
    def _kept(self) -> dict[int, int]:
        """New numbers of the entries before an update, by their old ones."""
        before = [number for number, entry in enumerate(self.base.entries) if entry.kind is not Kind.U]
        return {old: new for new, old in enumerate(before)}

    def _closing(self) -> Iterator[Entry]:
        last = self.base.stations - 1
        updates = {entry.station: entry for entry in self.base.entries if entry.kind is Kind.U}
        for station in range(last, -1, -1):
            takes = (Port(_SQUARES, station + 1),) if station < last else ()
            gives = (Port(_SQUARES, station - 1),) if station else ()
            yield Entry(ADD_SQUARES, station, 0, takes, gives, per="update")
        for station in range(last + 1):
            takes = (Port(_NORM, station - 1),) if station else ()
            gives = (Port(_NORM, station + 1),) if station < last else ()
            yield Entry(TELL_NORM, station, 0, takes, gives, per="update")
            yield updates[station]

    @property
    def depth(self) -> int:
        return self.base.depth

    def feed(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        for number, micro in self.base.feed(first, count):
            if number in self._kept:
                yield self._kept[number], micro
        for number in range(len(self._kept), len(self.entries)):
            yield number, first + count - 1

    def drain(self, fed: int) -> Iterator[tuple[int, int]]:
        return iter(())

    def delay(self, stage: int) -> int:
        return self.base.delay(stage)

    def finished(self, stage: int, micro: int) -> int:
        return self.base.finished(stage, micro)
