"""Schedules as data: who does what in which order, and what follows from that. No torch here."""

from __future__ import annotations

from .actions import Action, Kind, Schedule, with_updates
from .execution import interleave
from .flushed import ZBH1, ZBH2, Flushed, GPipe, OneFOneB, Sequential
from .freshness import staleness, versions
from .occupancy import Buffers, buffers
from .picture import gantt, timetable
from .rounds import Rounds, forward_locked, one_f_one_b_async, ticked
from .runs import Streams, by_stage, place, streams, unroll, update_ends
from .simulate import UNIT, Costs, Link, Timeline, simulate
from .ticks import Entry, lockstep, tick_entries
from .validity import check, check_order

__all__ = [
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
    "Link",
    "OneFOneB",
    "Rounds",
    "Schedule",
    "Sequential",
    "Streams",
    "Timeline",
    "buffers",
    "by_stage",
    "check",
    "check_order",
    "forward_locked",
    "gantt",
    "interleave",
    "lockstep",
    "one_f_one_b_async",
    "place",
    "simulate",
    "staleness",
    "streams",
    "tick_entries",
    "ticked",
    "timetable",
    "unroll",
    "update_ends",
    "versions",
    "with_updates",
]
