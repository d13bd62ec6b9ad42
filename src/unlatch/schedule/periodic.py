"""Schedules that go on for ever: in slot `s` every entry is done for micro-batch `s - offset`, in the listed order.

What a chain of stages does asynchronously differs in the offsets alone. In round `i` stage `s` does `F(i)` and
`B(i - delay[s])`, in one of two orders; with all delays falling towards the last stage, going through the stages
upwards is a valid order, since the gradient for `B(i - delay[s])` left stage `s + 1` in an earlier round.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..errors import ScheduleError
from .entries import Entry, Kind, Schedule, chain_entry

__all__ = ["Periodic", "forward_locked", "one_f_one_b_async", "rounds", "split_rounds", "ticked"]


@dataclass(frozen=True)
class Periodic(Schedule):
    """Entries at fixed offsets.

    **Arguments:**

    - `stages`: of the network.
    - `entries`: in the order of execution within a slot.
    - `hop`: ticks that a message needs to the next stage when stages run in lock-step, for timetables: 0 where the
      whole forward pass happens inside one tick.

    >>> two = Periodic(1, (chain_entry(Kind.F, 0, 1), chain_entry(Kind.B, 0, 1, offset=2)))
    >>> [(str(two.entries[number]), micro) for number, micro in two.feed(2, 1)], two.depth
    ([('0F', 2), ('0B', 0)], 2)
    """

    stages: int
    entries: tuple[Entry, ...]
    hop: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ScheduleError(f"expected at least 1 stage, got {self.stages}")
        if not self.entries:
            raise ScheduleError("the schedule lists no entries: expected at least one for every stage")
        for entry in self.entries:
            if entry.offset < 0 or entry.station < 0:
                raise ScheduleError(f"entry {entry} at offset {entry.offset}: stations and slots count from 0")

    @cached_property
    def depth(self) -> int:
        return max(entry.offset for entry in self.entries)

    @cached_property
    def _due(self) -> list[tuple[int, int]]:
        return [(number, entry.offset) for number, entry in enumerate(self.entries)]

    @cached_property
    def _by_offset(self) -> list[tuple[int, int]]:
        return sorted((offset, number) for number, offset in self._due)

    def _between(self, low: int, high: int) -> list[tuple[int, int]]:
        """Entries with offsets from `low` to `high`, as listed: few of many while a long pipeline fills or empties."""
        first, end = bisect_left(self._by_offset, (low, -1)), bisect_left(self._by_offset, (high + 1, -1))
        return sorted((number, offset) for offset, number in self._by_offset[first:end])

    def feed(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        for slot in range(first, first + count):
            for number, offset in self._due if slot >= self.depth else self._between(0, slot):
                yield number, slot - offset

    def drain(self, fed: int) -> Iterator[tuple[int, int]]:
        for slot in range(fed, fed + self.depth):
            for number, offset in self._between(slot - fed + 1, slot):
                yield number, slot - offset

    def delay(self, stage: int) -> int:
        found = self.passes(stage)
        return self.entries[found[1]].offset - self.entries[found[0]].offset if found is not None else 0

    def passes(self, stage: int) -> tuple[int, int] | None:
        """Numbers of the entries that are a stage's forward and its last gradient; `None` if it does not do both."""
        mine = [(number, entry.kind) for number, entry in enumerate(self.entries) if entry.station == stage]
        forward = next((number for number, kind in mine if kind is Kind.F), None)
        gradient = max(
            (number for number, kind in mine if kind.cost in ("backward", "weight gradient")),
            key=lambda number: (self.entries[number].offset, number),
            default=None,
        )
        return None if forward is None or gradient is None else (forward, gradient)

    def finished(self, stage: int, micro: int) -> int:
        """Count the gradients that `stage` has added up when it begins the forward of `micro`.

        >>> ticked(3).finished(0, 9), ticked(3, backward_first=True).finished(0, 9)
        (5, 6)
        """
        found = self.passes(stage)
        return max(0, micro - self.delay(stage) + (found is not None and found[1] < found[0]))


def rounds(delays: Sequence[int], *, backward_first: bool = False, split: int | None = None, hop: int = 1) -> Periodic:
    """One forward and one delayed backward per stage and round.

    **Arguments:**

    - `delays`: for each stage, how many rounds its backward lags its forward; strictly falling to 0.
    - `backward_first`: whether a stage turns to its backward before its forward within a round.
    - `split`: do the backward in two halves, with the weight gradient so many rounds after the input gradient. Nobody
      waits for it, so that it only makes the update older.
    - `hop`: see `Periodic`.

    >>> schedule = rounds((2, 0), split=1)
    >>> " ".join(f"{schedule.entries[number]}{micro}" for number, micro in schedule.feed(2, 1))
    '0F2 0I0 1F2 1I2 1W1 1U1'
    """
    stages = len(delays)
    if not stages:
        raise ScheduleError("expected at least 1 stage, got 0")
    if delays[-1] != 0 or any(a <= b for a, b in pairwise(delays)):
        raise ScheduleError(f"delays {tuple(delays)} do not suit stages: expected one per stage, strictly falling to 0")
    if split is not None and (split < 0 or backward_first):
        raise ScheduleError(
            f"a backward in halves needs its forward first and a weight gradient no earlier than the input gradient, "
            f"got split={split} and backward_first={backward_first}"
        )
    entries: list[Entry] = []
    for stage, delay in enumerate(delays):
        forward = chain_entry(Kind.F, stage, stages)
        if split is None:
            backward = [chain_entry(kind, stage, stages, delay) for kind in (Kind.B, Kind.U)]
        else:
            late = delay + split
            backward = [chain_entry(Kind.I, stage, stages, delay)]
            backward += [chain_entry(kind, stage, stages, late) for kind in (Kind.W, Kind.U)]
        entries += [*backward, forward] if backward_first and delay > 0 else [forward, *backward]
    return Periodic(stages, tuple(entries), hop)


def ticked(stages: int, *, backward_first: bool = False) -> Periodic:
    """All locks open, one hop per tick: delay 2(K-k) at stage k of K (FDG, ADL, DSP, DTR, PETRA, LayerPipe2).

    >>> [ticked(3).delay(stage) for stage in range(3)]
    [4, 2, 0]
    """
    return rounds([2 * (stages - 1 - s) for s in range(stages)], backward_first=backward_first)


def one_f_one_b_async(stages: int) -> Periodic:
    """PipeDream's 1F1B without flush: delay K-k.

    >>> [one_f_one_b_async(3).delay(stage) for stage in range(3)]
    [2, 1, 0]
    """
    return rounds([stages - 1 - s for s in range(stages)])


def forward_locked(stages: int) -> Periodic:
    """The whole forward pass in one round, backward delayed by K-k (DDG, FR).

    The order at each stage is that of `one_f_one_b_async`; only the lock-step timetable differs.

    >>> forward_locked(3).hop
    0
    """
    return rounds([stages - 1 - s for s in range(stages)], hop=0)


def split_rounds(stages: int, late: int = 0) -> Periodic:
    """`ticked` with the backward in two halves, weight gradients `late` rounds after input gradients.

    >>> split_rounds(3, late=2).delay(2)
    2
    """
    return rounds([2 * (stages - 1 - s) for s in range(stages)], split=late)
