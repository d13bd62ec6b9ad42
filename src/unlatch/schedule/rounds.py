"""Asynchronous schedules: round by round, every stage takes one micro-batch forward and an older one backward.

In round `i` stage `s` does `F(i)` and `B(i - delay[s])`, in one of two orders. With all delays falling towards the last
stage, going through the stages upwards is a valid global order: the cotangent for `B(i - delay[s])` left stage `s + 1`
in round `i - delay[s] + delay[s + 1] < i`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ScheduleError
from .actions import Action, Kind, Schedule

__all__ = ["Rounds", "forward_locked", "one_f_one_b_async", "ticked"]


@dataclass(frozen=True)
class Rounds(Schedule):
    """One forward and one delayed backward per stage and round.

    **Arguments:**

    - `delays`: for each stage, how many rounds its backward lags its forward; strictly falling to 0.
    - `backward_first`: whether a stage turns to its backward before its forward within a round.
    - `hop`: rounds a message needs to the next stage when stages run in lock-step (1), or 0 where the whole forward
      pass happens inside one round.
    """

    delays: tuple[int, ...]
    backward_first: bool = False
    hop: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise ScheduleError(f"expected at least 1 stage, got {self.stages}")
        falling = all(a > b for a, b in zip(self.delays, self.delays[1:], strict=False))
        if len(self.delays) != self.stages or not falling or self.delays[-1] != 0:
            raise ScheduleError(
                f"delays {self.delays} do not suit {self.stages} stages: expected one per stage, strictly falling to 0"
            )

    def feed(self, first: int, count: int) -> Iterator[Action]:
        for i in range(first, first + count):
            for stage, delay in enumerate(self.delays):
                forward = Action(Kind.F, stage, i)
                if i < delay:
                    yield forward
                elif self.backward_first and delay > 0:
                    yield Action(Kind.B, stage, i - delay)
                    yield forward
                else:
                    yield forward
                    yield Action(Kind.B, stage, i - delay)

    def drain(self, fed: int) -> Iterator[Action]:
        for i in range(fed, fed + self.delays[0]):
            for stage, delay in enumerate(self.delays):
                if 0 <= i - delay < fed:
                    yield Action(Kind.B, stage, i - delay)

    def delay(self, stage: int) -> int:
        return self.delays[stage]

    def finished(self, stage: int, micro: int) -> int:
        """Count the backwards that `stage` has done when it begins the forward of `micro`.

        >>> ticked(3).finished(0, 9), ticked(3, backward_first=True).finished(0, 9)
        (5, 6)
        """
        delay = self.delays[stage]
        return max(0, micro - delay + (self.backward_first and delay > 0))


def ticked(stages: int, *, backward_first: bool = False) -> Rounds:
    """All locks open, one hop per tick: delay 2(K-k) at stage k of K (FDG, ADL, DSP, DTR, PETRA, LayerPipe2).

    >>> [str(a) for a in ticked(2).feed(0, 1)]
    ['0F0', '1F0', '1B0']
    """
    return Rounds(stages, tuple(2 * (stages - 1 - s) for s in range(stages)), backward_first)


def one_f_one_b_async(stages: int) -> Rounds:
    """PipeDream's 1F1B without flush: delay K-k.

    >>> one_f_one_b_async(3).delays
    (2, 1, 0)
    """
    return Rounds(stages, tuple(stages - 1 - s for s in range(stages)))


def forward_locked(stages: int) -> Rounds:
    """The whole forward pass in one round, backward delayed by K-k (DDG, FR).

    The order at each stage is that of `one_f_one_b_async`; only the lock-step timetable differs.

    >>> forward_locked(3).hop
    0
    """
    return Rounds(stages, tuple(stages - 1 - s for s in range(stages)), hop=0)
