"""Which weights does each action see? The version of a stage is the number of updates it has made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ..errors import ScheduleError
from .actions import Action, Kind, Schedule
from .rounds import Rounds
from .runs import Streams

__all__ = ["staleness", "versions"]


def versions(streams: Streams) -> dict[Action, int]:
    """Give, for every action, how many updates its stage has made before.

    >>> from .rounds import ticked
    >>> from .runs import streams
    >>> seen = versions(streams(ticked(2), [1] * 4))
    >>> seen[Action(Kind.F, 0, 3)], seen[Action(Kind.B, 0, 3)]
    (1, 3)
    """
    made: dict[int, int] = {}
    seen: dict[Action, int] = {}
    for stream in streams:
        for action in stream:
            seen[action] = made.setdefault(action.stage, 0)
            if action.kind is Kind.U:
                made[action.stage] += 1
    return seen


def staleness(schedule: Schedule, stage: int, micro: int, group: int | Sequence[int] = 1) -> int:
    """Count the updates that `stage` makes between the forward and the backward of a micro-batch, in closed form.

    A backward sees as many updates as there are whole groups before its own, whatever the schedule; a forward as many
    as there are whole groups among the backwards done before it.

    **Arguments:**

    - `micro`: the micro-batch, counted from when the pipeline was last empty.
    - `group`: micro-batches per update, or the number of each update in turn where they differ.

    >>> from .rounds import ticked
    >>> [staleness(ticked(3), stage, 20) for stage in range(3)]
    [4, 2, 0]
    >>> [staleness(ticked(3), 0, micro, group=3) for micro in range(20, 23)]
    [1, 2, 1]
    """
    if schedule.flushes:
        return 0
    if not isinstance(schedule, Rounds):
        raise ScheduleError(f"no closed form for {type(schedule).__name__}: use versions(streams(...))")
    done = schedule.finished(stage, micro)
    if isinstance(group, int):
        return micro // group - done // group
    ends = list(accumulate(group))
    return bisect_right(ends, micro) - bisect_right(ends, done)
