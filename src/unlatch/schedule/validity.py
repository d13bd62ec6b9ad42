"""Is it a schedule? Everything once, in an order that small buffers can execute, and the same updates everywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import ScheduleError
from .actions import Action, Kind
from .excerpt import excerpt
from .execution import Progress, interleave
from .runs import Streams, by_stage, place

__all__ = ["check", "check_order"]

# What every stage owes each micro-batch; a whole backward counts as both gradients.
_DUTIES = (
    ("forward", (Kind.F,), Kind.F),
    ("backward", (Kind.B, Kind.I), Kind.B),
    ("weight gradient", (Kind.B, Kind.W), Kind.W),
)


def check(streams: Streams, slots: int = 1) -> None:
    """Raise `ScheduleError` unless the streams are a complete run that cannot get stuck.

    Every stage does the forward, the backward (`B`, or `I` and `W`) of micro-batches `0 .. n - 1` once and in the order
    of their ids, each backward after its forward; every gradient is followed by an update, and an update holds the
    same micro-batches at all stages; and no stage waits for ever.

    **Arguments:**

    - `streams`: what each worker does, in order.
    - `slots`: messages under way that each border can hold per direction before the sender must wait. What runs with
      one slot runs with any number.

    >>> from .rounds import ticked
    >>> from .runs import streams
    >>> check(streams(ticked(4), [2, 2, 2], accumulate=2))
    """
    if slots < 1:
        raise ScheduleError(f"expected at least 1 message per border, got slots={slots}")
    stages = by_stage(streams)
    count = 1 + max((a.batch for stream in stages for a in stream if a.kind is not Kind.U), default=-1)
    if count == 0:
        raise ScheduleError("the schedule has no forward and no backward at all")
    for stage in range(len(stages)):
        for duty, kinds, default in _DUTIES:
            _check_once_in_order(stages, stage, count, duty, kinds, default)
        _check_backward_after_forward(stages, stage)
    groups = [_updates(stages, stage) for stage in range(len(stages))]
    for stage, updates in enumerate(groups):
        if updates != groups[0]:
            number = next((n for n, (a, b) in enumerate(zip(updates, groups[0], strict=False)) if a != b), len(updates))
            raise ScheduleError(
                f"update {number} does not end with the same micro-batch at stages 0 and {stage}: "
                f"the updates end with {groups[0]} and {updates}"
            )
    for _ in interleave(streams, slots):
        pass


def check_order(order: Iterable[Action]) -> None:
    """Raise `ScheduleError` unless one global order is a complete run in which nothing comes before what it needs.

    >>> from .rounds import ticked
    >>> from .runs import unroll
    >>> check_order(unroll(ticked(3), [1, 1]))
    """
    order = list(order)
    stages = 1 + max((action.stage for action in order), default=-1)
    check(place(order, range(stages)) if stages else [])
    progress = Progress(range(stages))
    for position, action in enumerate(order):
        needed = progress.blocker(action)
        if needed is not None:
            raise ScheduleError(f"{action} comes before {needed}, which it needs:\n{excerpt([order], {0: position})}")
        progress.finish(action)


def _check_once_in_order(
    stages: Streams, stage: int, count: int, duty: str, kinds: tuple[Kind, ...], default: Kind
) -> None:
    ids = [a.batch for a in stages[stage] if a.kind in kinds]
    if ids == list(range(count)):
        return
    times = Counter(ids)
    missing = next((batch for batch in range(count) if batch not in times), None)
    done = [(position, a) for position, a in enumerate(stages[stage]) if a.kind in kinds]
    if missing is not None:
        # Another stage tells whether this schedule splits its backward.
        kind = next((a.kind for stream in stages for a in stream if a.kind in kinds and a.batch == missing), default)
        gap = next((position for position, a in done if a.batch > missing), len(stages[stage]))
        raise ScheduleError(
            f"stage {stage} never does the {duty} of micro-batch {missing}: {stage}{kind}{missing} is missing\n"
            + _around(stages, stage, gap, missing)
        )
    expected, (position, action) = next((n, d) for n, d in enumerate(done) if d[1].batch != n)
    fault = "a second time" if times[action.batch] > 1 else f"where micro-batch {expected} should come"
    raise ScheduleError(f"stage {stage} does {action} {fault}\n" + _around(stages, stage, position, action.batch))


def _check_backward_after_forward(stages: Streams, stage: int) -> None:
    forwards = inputs = 0
    for position, action in enumerate(stages[stage]):
        kind, _, batch = action
        forwards += kind is Kind.F
        if kind is Kind.W and batch >= inputs:
            needs = Kind.I
        elif kind in (Kind.B, Kind.I) and batch >= forwards:
            needs = Kind.F
        else:
            inputs += kind in (Kind.B, Kind.I)
            continue
        raise ScheduleError(
            f"stage {stage} does {action} before {stage}{needs}{batch}\n" + _around(stages, stage, position, batch)
        )


def _updates(stages: Streams, stage: int) -> list[int]:
    """Give the last micro-batch of each update, having checked that all gradients reach one."""
    ends: list[int] = []
    newest = -1
    for position, action in enumerate(stages[stage]):
        if action.kind in (Kind.B, Kind.W):
            newest = action.batch
        elif action.kind is Kind.U:
            if action.batch != len(ends):
                raise ScheduleError(
                    f"stage {stage} does {action}, but {stage}{Kind.U}{len(ends)} is the update that is due\n"
                    + _around(stages, stage, position, newest)
                )
            if newest == (ends[-1] if ends else -1):
                raise ScheduleError(
                    f"stage {stage} does {action} without a new gradient\n" + _around(stages, stage, position, newest)
                )
            ends.append(newest)
    if not ends or ends[-1] != newest:
        raise ScheduleError(
            f"stage {stage} never applies the gradient of micro-batch {newest}: "
            f"update {stage}{Kind.U}{len(ends)} is missing\n" + _around(stages, stage, len(stages[stage]), newest)
        )
    return ends


def _around(stages: Streams, stage: int, position: int, batch: int) -> str:
    """Show the place in its stage, and the same micro-batch at the neighbours."""
    marks = {stage: position}
    for other in (stage - 1, stage + 1):
        if 0 <= other < len(stages):
            marks[other] = _first(stages[other], batch)
    return excerpt(stages, marks, name="stage")


def _first(stream: Sequence[Action], batch: int) -> int:
    return next((at for at, a in enumerate(stream) if a.batch == batch and a.kind is not Kind.U), len(stream))
