"""Schedules as data: who does what in which order, and what follows from that. No torch here.

`entries` is the vocabulary (read it first), `periodic` and `flushed` make schedules, `runs` unrolls them. Passes over
them: `validity`, `occupancy`, `picture`, and the simulator (`simulator`, `simulation`, `workload`, `machine`).
`stability` has the limits of delayed updates. Exported names are public; a schedule of your own is made of `Entry`.
"""

from __future__ import annotations

from .entries import OUTSIDE, Action, Entry, Kind, Port, Schedule, chain_entry
from .flushed import ZBH1, ZBH2, Flushed, GPipe, OneFOneB, Sequential
from .occupancy import Buffers, buffers, staleness, steady_buffers, versions
from .periodic import Periodic, forward_locked, one_f_one_b_async, rounds, split_rounds, ticked
from .picture import TickEntry, entry_table, gantt, lockstep, slot_table, tick_entries, timetable
from .replicated import SHARE_ROWS, Replicated, adding, giving, parts_of, taking
from .runs import Streams, by_station, place, streams, unroll, update_ends
from .simulator import Timeline, simulate
from .validity import check, check_order, check_schedule, interleave
from .whole_norm import ADD_SQUARES, TELL_NORM, WholeNorm
from .workload import UNIT, Costs, Workload

__all__ = [
    "ADD_SQUARES",
    "OUTSIDE",
    "SHARE_ROWS",
    "TELL_NORM",
    "UNIT",
    "ZBH1",
    "ZBH2",
    "Action",
    "Buffers",
    "Costs",
    "Entry",
    "Flushed",
    "GPipe",
    "Kind",
    "OneFOneB",
    "Periodic",
    "Port",
    "Replicated",
    "Schedule",
    "Sequential",
    "Streams",
    "TickEntry",
    "Timeline",
    "WholeNorm",
    "Workload",
    "adding",
    "buffers",
    "by_station",
    "chain_entry",
    "check",
    "check_order",
    "check_schedule",
    "entry_table",
    "forward_locked",
    "gantt",
    "giving",
    "interleave",
    "lockstep",
    "one_f_one_b_async",
    "parts_of",
    "place",
    "rounds",
    "simulate",
    "slot_table",
    "split_rounds",
    "staleness",
    "steady_buffers",
    "streams",
    "taking",
    "tick_entries",
    "ticked",
    "timetable",
    "unroll",
    "update_ends",
    "versions",
]
