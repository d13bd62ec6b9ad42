"""The lock-step timetable of an asynchronous schedule: what every module does in tick 1, 2, 3, ...

Stage `s` does its round `i` in tick `i + hop * s`. With `hop = 1` and delays of two per stage every message of tick `t`
is used in tick `t + 1`. Elsewhere a wave runs through all stages inside one tick: the forwards of `forward_locked`
(`hop = 0`), and the backwards of `one_f_one_b_async`, whose delays leave no tick for the way down; `gantt` shows how
such a schedule really flows.

Papers count ticks, modules, batches and versions from 1, and so does everything here.
"""

from __future__ import annotations

from itertools import chain
from typing import Literal, NamedTuple

from ..errors import ScheduleError
from .actions import Action, Kind, Schedule
from .freshness import versions
from .rounds import Rounds
from .runs import streams

__all__ = ["Entry", "Numbering", "lockstep", "tick_entries"]

Numbering = Literal["paper", "real"]


class Entry(NamedTuple):
    """One thing in one cell of the timetable.

    `what` is `fw` (forward), `bw` (backward on what the forward kept), `re` (recomputation and backward), or `fb`
    (forward and backward of the same batch, at the last module).

    >>> str(Entry(5, 1, "re", 1, 5))
    're b1 W5'
    """

    tick: int
    module: int
    what: str
    batch: int
    version: int

    def __str__(self) -> str:
        return f"{self.what} b{self.batch} W{self.version}"


def lockstep(schedule: Rounds, ticks: int, batches: int | None = None) -> list[list[list[Action]]]:
    """Give, for each of the first `ticks` ticks and each stage, what is done, in order.

    **Arguments:**

    - `batches`: how many are fed before the pipeline drains; by default it never does.

    >>> [[str(a) for a in cell] for cell in lockstep(Rounds(2, (2, 0)), 3)[2]]
    [['0F2', '0B0'], ['1F1', '1B1']]
    """
    fed = ticks if batches is None else batches
    table: list[list[list[Action]]] = [[[] for _ in range(schedule.stages)] for _ in range(ticks)]
    for action in chain(schedule.feed(0, fed), schedule.drain(fed)):
        tick = _round(schedule, action) + schedule.hop * action.stage
        if tick < ticks:
            table[tick][action.stage].append(action)
    return table


def tick_entries(
    schedule: Schedule,
    ticks: int,
    *,
    recompute: bool = False,
    versions: Numbering | None = None,
    batches: int | None = None,
    group: int = 1,
) -> list[Entry]:
    """List what happens in the first `ticks` ticks with the weight version that it uses.

    **Arguments:**

    - `recompute`: whether a backward recomputes its forward with the current weights; otherwise it uses what the
      forward kept, and carries the version of that forward.
    - `versions`: how they are numbered. `"real"`: 1 plus the updates made. `"paper"`: the number grows in each tick of
      a module at the place of its backward, even before it has one, while the weights stay; this is how DTR's
      timetable is written. By default `"paper"` for schedules with the backward first, `"real"` for all others.
    - `batches`: how many are fed before the pipeline drains; by default it never does.
    - `group`: micro-batches per update.

    >>> [str(entry) for entry in tick_entries(Rounds(2, (2, 0)), 3) if entry.tick == 3]
    ['fw b3 W1', 'bw b1 W1', 'fb b2 W2']
    """
    if not isinstance(schedule, Rounds):
        raise ScheduleError(
            f"{type(schedule).__name__} has no lock-step timetable: draw its gantt(streams(...)) instead"
        )
    if versions is None:
        versions = "paper" if schedule.backward_first and group == 1 else "real"
    if versions == "paper" and group != 1:
        raise ScheduleError(f'versions="paper" counts an update per tick, but an update has {group} micro-batches')
    label = _paper_labels if versions == "paper" else _real_labels
    table = lockstep(schedule, ticks, batches)
    labels = label(schedule, table, group)
    entries = []
    for tick, row in enumerate(table, start=1):
        for cell in row:
            whats = [(action, _what(action, recompute)) for action in cell]
            if len(cell) == 2 and cell[0].batch == cell[1].batch:
                whats = [(cell[0], "fb")]
            for action, what in whats:
                source = action._replace(kind=Kind.F) if what == "bw" else action
                entries.append(Entry(tick, action.stage + 1, what, action.batch + 1, labels[source]))
    return entries


def _what(action: Action, recompute: bool) -> str:
    if action.kind is Kind.F:
        return "fw"
    return "re" if recompute else "bw"


def _round(schedule: Rounds, action: Action) -> int:
    return action.batch if action.kind is Kind.F else action.batch + schedule.delays[action.stage]


def _paper_labels(schedule: Rounds, table: list[list[list[Action]]], group: int) -> dict[Action, int]:
    labels = {}
    for action in (action for row in table for cell in row for action in cell):
        after_backward = action.kind is Kind.F and schedule.backward_first and schedule.delays[action.stage] > 0
        labels[action] = _round(schedule, action) + 1 + after_backward
    return labels


def _real_labels(schedule: Rounds, table: list[list[list[Action]]], group: int) -> dict[Action, int]:
    fed = 1 + max((action.batch for row in table for cell in row for action in cell), default=0)
    return {action: 1 + seen for action, seen in versions(streams(schedule, [1] * fed, group)).items()}
