"""Asynchronous rounds with the backward in two halves, the second of which may come later still (LayerPipe's `g`).

In round `i` stage `s` does `F(i)`, `I(i - delay[s])` and `W(i - delay[s] - g)`. Nobody waits for a weight gradient, so
`g` costs no other stage anything; it only makes the update `g` micro-batches older.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ScheduleError
from .actions import Action, Kind, Schedule
from .rounds import Rounds

__all__ = ["SplitRounds", "split_rounds"]


@dataclass(frozen=True)
class SplitRounds(Schedule):
    """One forward, one delayed input gradient and one weight gradient per stage and round.

    **Arguments:**

    - `delays`: for each stage, how many rounds its input gradient lags its forward; strictly falling to 0.
    - `g`: how many rounds a weight gradient lags the input gradient.

    >>> " ".join(map(str, SplitRounds(2, (2, 0), g=1).feed(2, 1)))
    '0F2 0I0 1F2 1I2 1W1'
    """

    delays: tuple[int, ...]
    g: int = 0

    splits_backward = True

    def __post_init__(self) -> None:
        Rounds(self.stages, self.delays)
        if self.g < 0:
            raise ScheduleError(f"a weight gradient cannot come before the cotangent: expected g >= 0, got {self.g}")

    def feed(self, first: int, count: int) -> Iterator[Action]:
        for i in range(first, first + count):
            for stage in range(self.stages):
                yield Action(Kind.F, stage, i)
                yield from self._backwards(stage, i, i + 1)

    def drain(self, fed: int) -> Iterator[Action]:
        for i in range(fed, fed + self.delay(0)):
            for stage in range(self.stages):
                yield from self._backwards(stage, i, fed)

    def delay(self, stage: int) -> int:
        """Rounds between the forward and the weight gradient of one micro-batch, in steady state."""
        return self.delays[stage] + self.g

    def _backwards(self, stage: int, i: int, fed: int) -> Iterator[Action]:
        for kind, batch in ((Kind.I, i - self.delays[stage]), (Kind.W, i - self.delay(stage))):
            if 0 <= batch < fed:
                yield Action(kind, stage, batch)


def split_rounds(rounds: Rounds, g: int = 0) -> SplitRounds:
    """The same delays with the backward in two halves.

    >>> from .rounds import ticked
    >>> split_rounds(ticked(3), g=2).delay(2)
    2
    """
    if rounds.backward_first:
        raise ScheduleError("a schedule with the backward first cannot be split: expected the forward first in a round")
    return SplitRounds(rounds.stages, rounds.delays, g)
