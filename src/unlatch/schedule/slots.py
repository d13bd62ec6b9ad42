"""A retimed schedule: in slot `s` every action with offset `r` is done for micro-batch `s - r`.

This is how LayerPipe's planner writes its schedules. What one slot sends is used in a later one, except that inside a
slot the listed order holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ScheduleError
from .actions import Action, Kind, Schedule

__all__ = ["Offset", "Slots"]


class Offset(NamedTuple):
    """An action that is due `slot` slots after a micro-batch has entered."""

    kind: Kind
    stage: int
    slot: int


@dataclass(frozen=True)
class Slots(Schedule):
    """Actions at fixed offsets.

    **Arguments:** `offsets`: in the order of execution within a slot.

    >>> both = Slots(1, (Offset(Kind.F, 0, 0), Offset(Kind.B, 0, 2)))
    >>> " ".join(map(str, both.feed(2, 1))), both.delay(0)
    ('0F2 0B0', 2)
    """

    offsets: tuple[Offset, ...]

    def __post_init__(self) -> None:
        for offset in self.offsets:
            if offset.slot < 0 or not 0 <= offset.stage < self.stages:
                raise ScheduleError(f"{offset} does not suit {self.stages} stages and slots that count from 0")

    @property
    def depth(self) -> int:
        """Slots until a micro-batch is through."""
        return max(offset.slot for offset in self.offsets)

    def feed(self, first: int, count: int) -> Iterator[Action]:
        for slot in range(first, first + count):
            yield from self._slot(slot, slot + 1)

    def drain(self, fed: int) -> Iterator[Action]:
        for slot in range(fed, fed + self.depth):
            yield from self._slot(slot, fed)

    def delay(self, stage: int) -> int:
        at = {kind: slot for kind, owner, slot in self.offsets if owner == stage}
        return at.get(Kind.W, at.get(Kind.B, 0)) - at.get(Kind.F, 0)

    def _slot(self, slot: int, fed: int) -> Iterator[Action]:
        for kind, stage, offset in self.offsets:
            if 0 <= slot - offset < fed:
                yield Action(kind, stage, slot - offset)
