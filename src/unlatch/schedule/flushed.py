"""Synchronous schedules: the pipeline takes in all micro-batches of a batch and is empty again at its end.

All of them are one rule. In round `x` a stage does the forward of micro-batch `x`, the backward of `x - lag` and, where
the backward is split, the weight gradient of `x - weight_lag`, leaving out what is not in `0 .. count - 1`. The lags
alone make the difference between one micro-batch at a time, GPipe, 1F1B and the two zero-bubble schedules.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar

from ..errors import ScheduleError
from .entries import Action, Entry, Kind, Schedule, chain_entry
from .simulator import simulate

__all__ = ["ZBH1", "ZBH2", "Flushed", "GPipe", "OneFOneB", "Sequential"]


@dataclass(frozen=True)
class Flushed(Schedule):
    """A synchronous schedule, given by how many rounds each stage's backward lags its forward.

    The global order is that of the starting times when a forward takes one unit, a whole backward two and each half of
    a backward one: a worker that holds several stages then turns to the one that would be ready first.
    """

    stages: int

    flushes = True
    kinds: ClassVar[tuple[Kind, ...]] = (Kind.F, Kind.B)

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ScheduleError(f"expected at least 1 stage, got {self.stages}")

    @abstractmethod
    def lag(self, stage: int, count: int) -> int:
        """Rounds from the forward of a micro-batch to its backward (or its input gradient)."""

    def weight_lag(self, count: int) -> int:
        """Rounds from the forward of a micro-batch to its weight gradient, where the backward is split."""
        raise NotImplementedError(f"{type(self).__name__} does not split its backward")

    @cached_property
    def entries(self) -> tuple[Entry, ...]:  # type: ignore[override]
        kinds = (*self.kinds, Kind.U)
        return tuple(chain_entry(kind, stage, self.stages) for stage in range(self.stages) for kind in kinds)

    @property
    def depth(self) -> int:
        return 0

    def stream(self, stage: int, count: int) -> tuple[Action, ...]:
        """Give what `stage` does for `count` micro-batches, in order, without its update.

        >>> " ".join(map(str, OneFOneB(3).stream(0, 4)))
        '0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3'
        """
        lags = [0, self.lag(stage, count), *([self.weight_lag(count)] if len(self.kinds) > 2 else [])]
        first = stage * (len(self.kinds) + 1)
        due = [(self.entries[first + place], lag) for place, lag in enumerate(lags)]
        return tuple(
            Action.of(entry, x - lag, x - lag)
            for x in range(count + max(lags))
            for entry, lag in due
            if 0 <= x - lag < count
        )

    def feed(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        for number, micro in _global_order(self, count):
            yield number, first + micro

    def drain(self, fed: int) -> Iterator[tuple[int, int]]:
        return iter(())

    def delay(self, stage: int) -> int:
        """Always 0: forward and backward of a micro-batch see the same update, since all updates follow the flush."""
        return 0

    def finished(self, stage: int, micro: int) -> int:
        return micro


# A training loop asks for the same order at every step.
@lru_cache(maxsize=64)
def _global_order(schedule: Flushed, count: int) -> tuple[tuple[int, int], ...]:
    if count < 1:
        return ()
    timeline = simulate([schedule.stream(stage, count) for stage in range(schedule.stages)])
    order: list[tuple[int, int]] = []
    width = len(schedule.kinds) + 1
    for action, _, _ in sorted(timeline, key=lambda row: (row[1], row[0].station)):
        place = schedule.kinds.index(action.kind)
        order.append((action.station * width + place, action.batch))
        if place == width - 2 and action.batch == count - 1:
            order.append((action.station * width + width - 1, action.batch))
    return tuple(order)


class Sequential(Flushed):
    """One micro-batch at a time, up and down: plain backpropagation.

    >>> from .runs import unroll
    >>> " ".join(map(str, unroll(Sequential(2), [2])))
    '0F0 1F0 1B0 0B0 0F1 1F1 1B1 1U0 0B1 0U0'
    """

    def lag(self, stage: int, count: int) -> int:
        return 0


class GPipe(Flushed):
    """All forwards, then all backwards, both in the order of the ids.

    >>> " ".join(map(str, GPipe(2).stream(1, 3)))
    '1F0 1F1 1F2 1B0 1B1 1B2'
    """

    def lag(self, stage: int, count: int) -> int:
        return count - 1


class OneFOneB(Flushed):
    """Each stage turns to a backward as soon as it can, so that it keeps at most `stages - stage` micro-batches.

    >>> " ".join(map(str, OneFOneB(2).stream(0, 3)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """

    def lag(self, stage: int, count: int) -> int:
        return self.stages - 1 - stage


class ZBH1(Flushed):
    """1F1B with the weight gradients put off into what would be idle time, at the same peak memory.

    >>> " ".join(map(str, ZBH1(2).stream(1, 3)))
    '1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2'
    """

    kinds = (Kind.F, Kind.I, Kind.W)

    def lag(self, stage: int, count: int) -> int:
        return self.stages - 1 - stage

    def weight_lag(self, count: int) -> int:
        return self.stages - 1


class ZBH2(Flushed):
    """ZB-H1 with twice the lags: no idle time in the span of a stage from `2 * stages - 1` micro-batches on.

    It keeps up to `2 * stages - 1` micro-batches at every stage.

    >>> " ".join(map(str, ZBH2(2).stream(0, 3)))
    '0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2'
    """

    kinds = (Kind.F, Kind.I, Kind.W)

    def lag(self, stage: int, count: int) -> int:
        return 2 * (self.stages - 1 - stage)

    def weight_lag(self, count: int) -> int:
        return 2 * (self.stages - 1)
