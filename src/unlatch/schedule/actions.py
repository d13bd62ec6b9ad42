"""The vocabulary of schedules: what a stage can do, and to which micro-batch.

A schedule is data. It lists, in one global order, what happens when micro-batches enter the pipeline (`feed`) and when
it empties (`drain`). The stream of one stage is that list filtered by stage; each executor follows it literally, so
results do not depend on timing.

Stages count from 0 (nearest the data) to `stages - 1` (holds the loss), micro-batches from 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Action", "Kind", "Schedule", "with_updates"]


class Kind(StrEnum):
    """What a stage does: forward, backward, the two halves of a backward, or an update."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter for the input-gradient half
    W = "W"
    U = "U"


class Action(NamedTuple):
    """One thing one stage does: `batch` is a micro-batch id, or the update's number for `U`.

    >>> str(Action(Kind.F, 2, 0))
    '2F0'
    """

    kind: Kind
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.batch}"


@dataclass(frozen=True)
class Schedule(ABC):
    """In which order `stages` stages treat the micro-batches that are fed to them."""

    stages: int

    #: Whether the pipeline is empty after every `feed` (synchronous schedules).
    flushes = False
    #: Whether the backward is done in two halves, `I` and `W`.
    splits_backward = False

    @abstractmethod
    def feed(self, first: int, count: int) -> Iterator[Action]:
        """Yield, in one global order, what the entry of micro-batches `first .. first+count-1` sets off.

        Ids count from 0 since the pipeline was last empty.
        """

    @abstractmethod
    def drain(self, fed: int) -> Iterator[Action]:
        """Yield what remains to be done once `fed` micro-batches have entered and no more will."""

    @abstractmethod
    def delay(self, stage: int) -> int:
        """Rounds between the forward and the backward of one micro-batch at `stage`, in steady state."""


def with_updates(actions: Iterable[Action], ends: dict[int, int]) -> Iterator[Action]:
    """Insert an update after the last gradient of each group.

    **Arguments:**

    - `actions`: `F`, `B`, `I`, `W` in order.
    - `ends`: for the last micro-batch of each group, the number of the update it completes. May grow while iterating.
    """
    for action in actions:
        yield action
        if action.kind in (Kind.B, Kind.W) and action.batch in ends:
            yield Action(Kind.U, action.stage, ends[action.batch])
