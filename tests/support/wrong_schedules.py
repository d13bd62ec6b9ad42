"""Schedules that cannot be executed, and what must be said about each."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from unlatch.methods import Compose
from unlatch.schedule import Entry, Kind, Periodic, Port, chain_entry, rounds


def circle(stages: int) -> Periodic:
    """Stage 0 wants the gradient of a micro-batch before it has sent the next one, which stage 1 wants first."""
    entries = [chain_entry(Kind.F, 0, 2), chain_entry(Kind.B, 0, 2), chain_entry(Kind.U, 0, 2)]
    entries += [chain_entry(Kind.F, 1, 2), chain_entry(Kind.B, 1, 2, offset=1), chain_entry(Kind.U, 1, 2, offset=1)]
    return Periodic(stages, tuple(entries))


def never_sent(stages: int) -> Periodic:
    """Stage 0 waits for a message that nobody sends."""
    entries = list(rounds((1, 0)).entries)
    entries[1] = Entry(Kind.B, 0, 1, takes=(Port("backward", 1), Port("advice", 1)))
    return Periodic(stages, tuple(entries))


def never_taken(stages: int) -> Periodic:
    """Stage 1 sends something that nobody reads."""
    entries = list(rounds((1, 0)).entries)
    entries[3] = Entry(Kind.F, 1, 0, entries[3].takes, (Port("gossip", 0),))
    return Periodic(stages, tuple(entries))


def never_applied(stages: int) -> Periodic:
    """Stage 1 never updates."""
    return Periodic(stages, rounds((1, 0)).entries[:-1])


def taken_twice(stages: int) -> Periodic:
    """Two entries of stage 1 take the one message that stage 0 sends."""
    return Periodic(stages, (*rounds((1, 0)).entries, Entry(Kind("Also"), 1, takes=(Port("forward", 0),))))


def disagreeing(stages: int) -> Periodic:
    """Stage 0 sends word of odd batches, stage 1 waits for that of even ones: as many, but never the right one."""
    tell = Entry(Kind("Tell"), 0, gives=(Port("word", 1),), when=lambda moment: moment.batch % 2 == 1)
    hear = Entry(Kind("Hear"), 1, takes=(Port("word", 0),), when=lambda moment: moment.batch % 2 == 0)
    return Periodic(stages, (*rounds((1, 0)).entries, tell, hear))


def after_a_warmup(stages: int) -> Periodic:
    """Stage 0 sends something that nobody reads, but only after a hundred batches."""
    tell = Entry(Kind("Tell"), 0, gives=(Port("word", 1),), when=lambda moment: moment.batch > 100)
    return Periodic(stages, (*rounds((1, 0)).entries, tell))


def two_senders(stages: int) -> Periodic:
    """Stage 1 takes two messages of one name and could not tell them apart."""
    tell = [Entry(Kind("Tell"), stage, gives=(Port("word", 1),)) for stage in range(2)]
    hear = Entry(Kind("Hear"), 1, takes=(Port("word", 0), Port("word", 1)))
    return Periodic(stages, (*rounds((1, 0)).entries, *tell, hear))


def done_twice(stages: int) -> Periodic:
    """Stage 0 is listed twice for the same work."""
    return Periodic(stages, (*rounds((1, 0)).entries, Entry(Kind("Also"), 0), Entry(Kind("Also"), 0, offset=1)))


def never_learned(stages: int) -> Periodic:
    """Forwards alone."""
    return Periodic(stages, tuple(chain_entry(Kind.F, stage, stages) for stage in range(stages)))


def of_other_stages(stages: int) -> Periodic:
    """Made for one stage more than was asked for."""
    return rounds((2, 1, 0))


def nothing(stages: int) -> Periodic:
    """No entries."""
    return Periodic(stages, ())


WRONG = {
    "circle": (circle, r"stream 0 stands before 0B0 and waits for 1B0[\s\S]*1 stands before 1F1 and waits for 0F1"),
    "never sent": (never_sent, r"0B0 waits for message 'advice' of station 1, which never sends one"),
    "never taken": (never_taken, r"station 0 never takes a message 'gossip' that station 1 sends it"),
    "taken twice": (taken_twice, r"1Also0 takes message 'forward' of micro-batch 0 from station 0, but that of 1"),
    "disagreeing": (disagreeing, r"1Hear0 takes message 'word' of micro-batch 0 from station 0, but that of 1"),
    "after a warm-up": (after_a_warmup, r"station 1 never takes a message 'word' that station 0 sends it"),
    "two senders": (two_senders, r"station 1 takes a message 'word' from station 0 and one from 1"),
    "done twice": (done_twice, r"station 0 does 0Also0 a second time"),
    "never learned": (never_learned, r"station 0 never does the backward of micro-batch 0"),
    "of other stages": (of_other_stages, r"for 3 station\(s\), but compose has 2 for stages=2"),
    "nothing": (nothing, r"lists no entries"),
    "never applied": (never_applied, r"station 1 never applies the gradient"),
}


def build(name: str) -> None:
    """Try to begin a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    method = Compose(order=WRONG[name][0], weights="stash", microbatches=1)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    unlatch.parallelize(model, method, stages=2, loss_fn=mse_loss, optimizer=optimizer, split=["1"])


def build_on_rank(name: str) -> str:
    """What a rank says instead of beginning."""
    try:
        build(name)
    except unlatch.errors.ScheduleError as error:
        return str(error)
    return "the run began"
