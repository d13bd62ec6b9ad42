"""A whole finite run of a schedule: all batches fed, the updates between them, the pipeline emptied at the end.

Every pass works on *streams*: for each worker the list of what it does, in order. A worker usually holds one stage;
with `devices` several stages share one, and their actions keep the schedule's global order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate as running_sum

from ..errors import ScheduleError
from .actions import Action, Schedule, with_updates

__all__ = ["Streams", "by_stage", "place", "stage_homes", "streams", "unroll", "update_ends"]

Streams = Sequence[Sequence[Action]]


def update_ends(groups: Sequence[int], accumulate: int = 1) -> dict[int, int]:
    """Number the updates by the last micro-batch of each.

    **Arguments:**

    - `groups`: number of micro-batches of each batch.
    - `accumulate`: batches per update; what is left over at the end makes a last, smaller update.

    >>> update_ends([2, 2, 2], accumulate=2)
    {3: 0, 5: 1}
    """
    if accumulate < 1 or not groups or min(groups) < 1:
        raise ScheduleError(
            f"expected at least one batch, one micro-batch in each and one batch per update, "
            f"got micro-batches {list(groups)} and accumulate={accumulate}"
        )
    totals = list(running_sum(groups))
    ends = totals[accumulate - 1 :: accumulate]
    if not ends or ends[-1] != totals[-1]:
        ends.append(totals[-1])
    return {end - 1: number for number, end in enumerate(ends)}


def unroll(schedule: Schedule, groups: Sequence[int], accumulate: int = 1) -> Iterator[Action]:
    """Yield the global order of a run over batches of `groups` micro-batches, updates and drain included.

    >>> from .rounds import ticked
    >>> " ".join(map(str, unroll(ticked(2), [1, 1])))
    '0F0 1F0 1B0 1U0 0F1 1F1 1B1 1U1 0B0 0U0 0B1 0U1'
    """
    ends = update_ends(groups, accumulate)

    def fed_and_drained() -> Iterator[Action]:
        fed = 0
        for count in groups:
            yield from schedule.feed(fed, count)
            fed += count
        yield from schedule.drain(fed)

    return with_updates(fed_and_drained(), ends)


def place(order: Iterable[Action], devices: Sequence[int]) -> list[list[Action]]:
    """Hand each action of a global order to the device of its stage.

    **Arguments:**

    - `devices`: for each stage, the number of its device.

    >>> from .rounds import ticked
    >>> [len(stream) for stream in place(ticked(3).feed(0, 2), [0, 0, 1])]
    [4, 4]
    """
    result: list[list[Action]] = [[] for _ in range(max(devices) + 1)]
    receivers = [result[device].append for device in devices]
    for action in order:
        receivers[action.stage](action)
    return result


def streams(
    schedule: Schedule, groups: Sequence[int], accumulate: int = 1, devices: Sequence[int] | None = None
) -> list[list[Action]]:
    """Give what each stage (or each device) does in a whole run, in order.

    **Arguments:**

    - `groups`: number of micro-batches of each batch.
    - `accumulate`: batches per update.
    - `devices`: for each stage the number of its device; by default every stage has its own.

    >>> from .rounds import ticked
    >>> [" ".join(map(str, stream)) for stream in streams(ticked(2), [1, 1])]
    ['0F0 0F1 0B0 0U0 0B1 0U1', '1F0 1B0 1U0 1F1 1B1 1U1']
    """
    return place(unroll(schedule, groups, accumulate), range(schedule.stages) if devices is None else devices)


def stage_homes(streams: Streams) -> list[int]:
    """Find, for each stage, the stream it is in; a stage in two streams or in none is an error."""
    home: dict[int, int] = {}
    for number, stream in enumerate(streams):
        for stage in {action.stage for action in stream}:
            if home.setdefault(stage, number) != number:
                raise ScheduleError(
                    f"stage {stage} is in streams {home[stage]} and {number}: expected all its actions in one stream"
                )
    if sorted(home) != list(range(len(home))) or not home:
        raise ScheduleError(f"expected stages numbered from 0 without gaps, got {sorted(home)}")
    return [home[stage] for stage in range(len(home))]


def by_stage(streams: Streams) -> list[list[Action]]:
    """Split streams of devices into streams of stages."""
    stages: list[list[Action]] = [[] for _ in stage_homes(streams)]
    for stream in streams:
        for action in stream:
            stages[action.stage].append(action)
    return stages
