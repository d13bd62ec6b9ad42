"""Schedules as text: the lock-step table of asynchronous ones, a Gantt chart of any run."""

from __future__ import annotations

from ..errors import ScheduleError
from .actions import Action, Schedule
from .runs import Streams
from .simulate import UNIT, Costs, Timeline, simulate
from .ticks import Numbering, tick_entries

__all__ = ["gantt", "timetable"]


def timetable(
    schedule: Schedule,
    ticks: int,
    recompute: bool = False,
    versions: Numbering | None = None,
    batches: int | None = None,
    group: int = 1,
) -> str:
    """Draw the first ticks in lock-step as a Markdown table; the arguments are those of `tick_entries`.

    `fw b3 W2` is the forward of batch 3 with weight version 2, `bw` a backward with the weights its forward used, `re`
    a recomputation and backward with the current weights, `fb` forward and backward at once.

    >>> from .rounds import ticked
    >>> print(timetable(ticked(2, backward_first=True), 3, recompute=True))
    | tick | module 1 | module 2 |
    |---|---|---|
    | 1 | fw b1 W2 | - |
    | 2 | fw b2 W3 | fb b1 W1 |
    | 3 | re b1 W3; fw b3 W4 | fb b2 W2 |
    """
    cells: dict[tuple[int, int], list[str]] = {}
    for entry in tick_entries(schedule, ticks, recompute=recompute, versions=versions, batches=batches, group=group):
        cells.setdefault((entry.tick, entry.module), []).append(str(entry))
    modules = range(1, schedule.stages + 1)
    lines = [["tick", *(f"module {module}" for module in modules)]]
    for tick in range(1, ticks + 1):
        lines.append([str(tick), *("; ".join(cells.get((tick, module), ["-"])) for module in modules)])
    head, *rows = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * (schedule.stages + 1) + "|", *rows])


def gantt(streams: Streams, costs: Costs = UNIT) -> str:
    """Draw a self-timed run with one row per worker and one column per unit of time.

    A longer action goes on as `=`, idle time is `.`, and what takes no time is left out. Costs must be whole numbers.

    >>> from .flushed import OneFOneB
    >>> from .runs import streams
    >>> print(gantt(streams(OneFOneB(2), [3])))
    stage 0 | F0 F1 .  .  B0 =  F2 B1 =  .  B2 =
    stage 1 | .  F0 B0 =  F1 B1 =  F2 B2 =  .  .
    """
    timeline = simulate(streams, costs)
    rows = [_row(timeline, number) for number in range(len(streams))]
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    margin = max(len(name) for name, _ in rows)
    lines = (f"{name:<{margin}} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip() for name, cells in rows)
    return "\n".join(lines)


def _row(timeline: Timeline, number: int) -> tuple[str, list[str]]:
    stream = timeline.streams[number]
    stages = {action.stage for action in stream}
    cells = ["."] * _whole(timeline.makespan)
    for action, start, end in zip(stream, timeline.starts[number], timeline.ends[number], strict=True):
        first, after = _whole(start), _whole(end)
        if after > first:
            cells[first:after] = [_label(action, len(stages) > 1), *["="] * (after - first - 1)]
    return (f"stage {stages.pop()}" if len(stages) == 1 else f"device {number}"), cells


def _label(action: Action, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.kind}{action.batch}"


def _whole(time: float) -> int:
    if time != int(time):
        raise ScheduleError(f"a Gantt chart in text needs whole numbers as costs, got the time {time}")
    return int(time)
