"""Schedules as text: the lock-step table of asynchronous ones, a Gantt chart of any run.

The lock-step timetable says what every module does in tick 1, 2, 3, ... Station `s` does slot `i` in tick
`i + hop * s`. With `hop = 1` and delays of two per stage every message of tick `t` is used in tick `t + 1`. Elsewhere a
wave runs through all stages inside one tick: the forwards of `forward_locked` (`hop = 0`), and the backwards of
`one_f_one_b_async`, whose delays leave no tick for the way down; `gantt` shows how such a schedule really flows.

Papers count ticks, modules, batches and versions from 1, and so do these tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Literal, NamedTuple

from ..errors import ScheduleError
from .entries import OUTSIDE, Action, Entry, Kind, Port, Schedule
from .occupancy import versions
from .periodic import Periodic
from .runs import Streams, moments, streams
from .simulator import Timeline, simulate
from .workload import Workload

__all__ = ["Numbering", "TickEntry", "entry_table", "gantt", "lockstep", "slot_table", "tick_entries", "timetable"]

Numbering = Literal["paper", "real"]


class TickEntry(NamedTuple):
    """One thing in one cell of the timetable.

    `what` is `fw` (forward), `bw` (backward on what the forward kept), `re` (recomputation and backward), `fb` (forward
    and backward of the same batch, at the last module), or the kind of any other entry that costs something.

    >>> str(TickEntry(5, 1, "re", 1, 5))
    're b1 W5'
    """

    tick: int
    module: int
    what: str
    batch: int
    version: int

    def __str__(self) -> str:
        return f"{self.what} b{self.batch} W{self.version}"


def lockstep(schedule: Periodic, ticks: int, batches: int | None = None) -> list[list[list[Action]]]:
    """Give, for each of the first `ticks` ticks and each stage, what is done, in order.

    **Arguments:**

    - `batches`: how many are fed before the pipeline drains; by default it never does.

    >>> from .periodic import ticked
    >>> [[str(a) for a in cell] for cell in lockstep(ticked(2), 3)[2]]
    [['0F2', '0B0'], ['1F1', '1B1']]
    """
    fed = ticks if batches is None else batches
    facts = moments([1] * fed)
    table: list[list[list[Action]]] = [[[] for _ in range(schedule.stations)] for _ in range(ticks)]
    for number, micro in chain(schedule.feed(0, fed), schedule.drain(fed)):
        entry = schedule.entries[number]
        tick = micro + entry.offset + schedule.hop * entry.station
        if tick < ticks and entry.per == "micro" and entry.due(facts[micro]):
            table[tick][entry.station].append(Action.of(entry, micro, micro))
    return table


def tick_entries(
    schedule: Schedule,
    ticks: int,
    *,
    recompute: bool = False,
    versions: Numbering | None = None,
    batches: int | None = None,
    group: int = 1,
) -> list[TickEntry]:
    """List what happens in the first `ticks` ticks with the weight version that it uses.

    **Arguments:**

    - `recompute`: whether a backward recomputes its forward with the current weights; otherwise it uses what the
      forward kept, and carries the version of that forward.
    - `versions`: how they are numbered. `"real"`: 1 plus the updates made. `"paper"`: the number grows in each tick of
      a module at the place of its backward, even before it has one, while the weights stay; this is how DTR's
      timetable is written. By default `"paper"` for schedules with the backward first, `"real"` for all others.
    - `batches`: how many are fed before the pipeline drains; by default it never does.
    - `group`: micro-batches per update.

    >>> from .periodic import ticked
    >>> [str(entry) for entry in tick_entries(ticked(2), 3) if entry.tick == 3]
    ['fw b3 W1', 'bw b1 W1', 'fb b2 W2']
    """
    if not isinstance(schedule, Periodic):
        raise ScheduleError(
            f"{type(schedule).__name__} has no lock-step timetable: draw its gantt(streams(...)) instead"
        )
    if versions is None:
        versions = "paper" if _backward_first(schedule) and group == 1 else "real"
    if versions == "paper" and group != 1:
        raise ScheduleError(f'versions="paper" counts an update per tick, but an update has {group} micro-batches')
    label = _paper_labels if versions == "paper" else _real_labels
    table = lockstep(schedule, ticks, batches)
    labels = label(schedule, table, group)
    forwards = {action[1:]: action for row in table for cell in row for action in cell if action.kind.cost == "forward"}
    entries = []
    for tick, row in enumerate(table, start=1):
        for cell in row:
            whats = [(action, _what(action, recompute)) for action in cell if action.kind.cost != "none"]
            if len(cell) == 2 and cell[0].batch == cell[1].batch:
                whats = [(cell[0], "fb")]
            for action, what in whats:
                source = forwards.get(action[1:], action) if what == "bw" else action
                entries.append(TickEntry(tick, action.station + 1, what, action.batch + 1, labels[source]))
    return entries


def _what(action: Action, recompute: bool) -> str:
    if action.kind.cost == "forward":
        return "fw"
    if action.kind.cost == "auxiliary":
        return str(action.kind)
    return "re" if recompute else "bw"


def _backward_first(schedule: Periodic) -> bool:
    return any(found is not None and found[1] < found[0] for found in map(schedule.passes, range(schedule.stages)))


def _paper_labels(schedule: Periodic, table: list[list[list[Action]]], group: int) -> dict[Action, int]:
    labels = {}
    for action in (action for row in table for cell in row for action in cell):
        assert action.entry is not None
        found = schedule.passes(action.station)
        after_backward = action.kind is Kind.F and found is not None and found[1] < found[0]
        labels[action] = action.micro + action.entry.offset + 1 + after_backward
    return labels


def _real_labels(schedule: Periodic, table: list[list[list[Action]]], group: int) -> dict[Action, int]:
    fed = 1 + max((action.batch for row in table for cell in row for action in cell), default=0)
    return {action: 1 + seen for action, seen in versions(streams(schedule, [1] * fed, group)).items()}


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

    >>> from .periodic import ticked
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


def entry_table(schedule: Schedule, station: int) -> str:
    """List what a schedule has one station do, in its order.

    `round` is how many micro-batches have entered since the one that is treated; synchronous schedules have an order
    of their own. What is done only for some micro-batches (a condition in `Entry.when`) says so.

    >>> from .periodic import ticked
    >>> print(entry_table(ticked(3), 1))
    entry  cost      round  takes            gives          for every
    F      forward   0      forward from 0   forward to 2   micro-batch
    B      backward  2      backward from 2  backward to 0  micro-batch
    U      update    2      -                -              update
    """
    heads = ("entry", "cost", "round", "takes", "gives", "for every")
    rows = [heads, *(_entry_row(entry, schedule.flushes) for entry in schedule.entries if entry.station == station)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def _entry_row(entry: Entry, flushes: bool) -> tuple[str, ...]:
    per = "update" if entry.per == "update" else "micro-batch"
    return (
        str(entry.kind),
        "-" if entry.kind.cost == "none" else entry.kind.cost,
        "-" if flushes else str(entry.offset),
        _ports(entry.takes, "from"),
        _ports(entry.gives, "to"),
        per if entry.when is None else f"{per} that meets its condition",
    )


def _ports(ports: Sequence[Port], way: str) -> str:
    told = (port.name if port.station == OUTSIDE else f"{port.name} {way} {port.station}" for port in ports)
    return ", ".join(told) or "-"


def slot_table(schedule: Periodic, slots: int, devices: Sequence[int]) -> str:
    """Draw the first slots as a Markdown table with a column per device; `3I1` is what station 3 does with batch 1.

    >>> from .periodic import ticked
    >>> print(slot_table(ticked(2), 2, [0, 0]))
    | slot | device 0 |
    |---|---|
    | 0 | 0F0 1F0 1B0 |
    | 1 | 0F1 1F1 1B1 |
    """
    columns = range(1 + max(devices))
    table: list[list[list[str]]] = [[[] for _ in columns] for _ in range(slots)]
    facts = moments([1] * slots)
    for number, micro in schedule.feed(0, slots):
        entry = schedule.entries[number]
        if entry.kind.cost != "none" and entry.per == "micro" and entry.due(facts[micro]):
            table[micro + entry.offset][devices[entry.station]].append(f"{entry}{micro}")
    lines = [["slot", *(f"device {device}" for device in columns)]]
    lines += [[str(slot), *(" ".join(cell) or "-" for cell in row)] for slot, row in enumerate(table)]
    head, *rows = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *rows])


def gantt(streams: Streams, workload: Workload | None = None) -> str:
    """Draw a self-timed run with one row per device and one column per unit of time.

    A longer action goes on as `=`, idle time is `.`, and what takes no time is left out. Times must be whole numbers.

    >>> from .flushed import OneFOneB
    >>> from .runs import streams
    >>> print(gantt(streams(OneFOneB(2), [3])))
    stage 0 | F0 F1 .  .  B0 =  F2 B1 =  .  B2 =
    stage 1 | .  F0 B0 =  F1 B1 =  F2 B2 =  .  .
    """
    timeline = simulate(streams, workload)
    shared = any(len({action.station for action in stream}) > 1 for stream in streams)
    rows = [_row(timeline, number, shared) for number in range(len(streams))]
    width = max((len(cell) for _, cells in rows for cell in cells), default=1)
    margin = max(len(name) for name, _ in rows)
    lines = (f"{name:<{margin}} | {' '.join(cell.ljust(width) for cell in cells)}".rstrip() for name, cells in rows)
    return "\n".join(lines)


def _row(timeline: Timeline, number: int, shared: bool) -> tuple[str, list[str]]:
    """A device; it is called a stage where no device has several stations."""
    stream = timeline.streams[number]
    cells = ["."] * _whole(timeline.makespan)
    for action, start, end in zip(stream, timeline.starts[number], timeline.ends[number], strict=True):
        first, after = _whole(start), _whole(end)
        if after > first:
            cells[first:after] = [_label(action, shared), *["="] * (after - first - 1)]
    return f"{'device' if shared else 'stage'} {number if shared else stream[0].station}", cells


def _label(action: Action, with_station: bool) -> str:
    return str(action) if with_station else f"{action.kind}{action.batch}"


def _whole(time: float) -> int:
    if time != int(time):
        raise ScheduleError(f"a Gantt chart in text needs whole numbers as costs, got the time {time}")
    return int(time)
