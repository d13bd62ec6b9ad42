"""The streams of a long run, stage by stage: what `streams` gives, without building the global order first."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Kind, Schedule
from .flushed import Flushed
from .rounds import Rounds
from .runs import streams, update_ends

__all__ = ["stage_streams"]


def stage_streams(schedule: Schedule, groups: Sequence[int], per_update: int = 1) -> list[list[Action]]:
    """What each stage does in a whole run, in order.

    **Arguments:** as in `streams`.

    >>> from .rounds import ticked
    >>> stage_streams(ticked(3), [1] * 4) == streams(ticked(3), [1] * 4)
    True
    """
    ends = update_ends(groups, per_update)
    if isinstance(schedule, Rounds):
        fed = sum(groups)
        return [_round_by_round(schedule, stage, fed, ends) for stage in range(schedule.stages)]
    if isinstance(schedule, Flushed):
        return [_batch_by_batch(schedule, stage, groups, ends) for stage in range(schedule.stages)]
    return streams(schedule, groups, per_update)


def _round_by_round(schedule: Rounds, stage: int, fed: int, ends: dict[int, int]) -> list[Action]:
    delay = schedule.delays[stage]
    backward_first = schedule.backward_first and delay > 0
    found: list[Action] = []
    for step in range(fed + delay):
        late = step - delay
        if step < fed and not (backward_first and late >= 0):
            found.append(Action(Kind.F, stage, step))
        if 0 <= late < fed:
            found.append(Action(Kind.B, stage, late))
            if late in ends:
                found.append(Action(Kind.U, stage, ends[late]))
            if step < fed and backward_first:
                found.append(Action(Kind.F, stage, step))
    return found


def _batch_by_batch(schedule: Flushed, stage: int, groups: Sequence[int], ends: dict[int, int]) -> list[Action]:
    found: list[Action] = []
    first = 0
    for count in groups:
        for kind, _, batch in schedule.stream(stage, count):
            found.append(Action(kind, stage, first + batch))
            if (kind is Kind.B or kind is Kind.W) and first + batch in ends:
                found.append(Action(Kind.U, stage, ends[first + batch]))
        first += count
    return found
