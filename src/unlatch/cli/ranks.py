"""The processes of one run as the command line sees them: who started them, how often, and words between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from ..transport.meeting import place
from ..transport.world import World, current_world

__all__ = ["all_ranks", "rank", "torchrun_name", "under_torchrun"]


def under_torchrun() -> bool:
    """Whether another launcher has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and place()[1] > 1


def rank() -> int:
    """The number of this process among those of torchrun; 0 if there is none."""
    return place()[0] if under_torchrun() else 0


def torchrun_name() -> str | None:
    """What a torchrun, and all processes that it starts now or later, are told from others by; `None` without one."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == "none":
        # It has none of its own unless it is given one, but starts all processes anew from the same place.
        agent = psutil.Process(os.getppid())
        return f"{socket.gethostname()}:{agent.pid}:{agent.create_time()}"
    return name


@contextmanager
def all_ranks() -> Iterator[World]:
    """The ranks of this run, for what they tell each other outside of training. Entered by all of them alike."""
    world = current_world()
    with world.telling_of_errors():
        yield world
    world.close()
