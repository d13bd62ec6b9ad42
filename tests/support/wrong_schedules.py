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


WRONG = {
    "circle": (circle, r"stream 0 stands before 0B0 and waits for 1B0[\s\S]*1 stands before 1F1 and waits for 0F1"),
    "never sent": (never_sent, r"0B0 waits for message 'advice' of station 1, which never sends one"),
    "never taken": (never_taken, r"station 0 never takes a message 'gossip' that station 1 sends it"),
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
