"""Long runs of a tiny network that is disturbed all the time, and what they take of the machine."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any, NamedTuple

import psutil
from torch import Tensor

from fault_jobs import start
from rank_jobs import copied_state
from small_nets import vectors
from unlatch import Faults

#: A few milliseconds here and there, at other moments in each of the places.
DELAYS = (
    Faults()
    .delay(0, ms=4, every=61, jitter=True, seed=1)
    .delay(1, ms=4, every=53, jitter=True, seed=2)
    .delay(1, ms=4, every=47, jitter=True, seed=3, during="backward")
)


class Taken(NamedTuple):
    """What a process has of the machine at a step."""

    step: int
    bytes: int
    threads: int
    descriptors: int


class Soaked(NamedTuple):
    state: dict[str, Tensor]
    losses: float
    taken: list[Taken]


def soak(method: Any, steps: int, disturbed: bool) -> Soaked:
    """Train for so many steps; look at the process a hundred times."""
    own, taken, losses = psutil.Process(), [], 0.0
    with start(method, 2, faults=DELAYS if disturbed else None) as run:
        data = itertools.islice(itertools.cycle(vectors(32, size=2)), steps)
        for number, (x, y) in enumerate(data):
            losses += run.step(x, y).loss or 0.0
            if number % (steps // 100) == 0:
                taken.append(Taken(number, own.memory_info().rss, threading.active_count(), own.num_fds()))
        losses += sum(result.loss or 0.0 for result in run.flush())
        state = copied_state(run.module())
    taken.append(Taken(steps, own.memory_info().rss, threading.active_count(), own.num_fds()))
    return Soaked(state, losses, taken)


def left_behind(methods: list[str]) -> list[tuple[int, int]]:
    """Threads and descriptors after each of some runs, one after the other."""
    found = []
    for method in methods:
        soak(method, 100, True)
        gc.collect()
        found.append((threading.active_count(), psutil.Process().num_fds()))
    return found


def slope(taken: list[Taken]) -> float:
    """Growth in megabytes per 1,000 steps: the line of least squares through the second half.

    >>> slope([Taken(n, 1_000_000 * n, 1, 1) for n in range(10)])
    1000.0
    """
    half = taken[len(taken) // 2 :]
    mean_step = sum(t.step for t in half) / len(half)
    mean_bytes = sum(t.bytes for t in half) / len(half)
    spread = sum((t.step - mean_step) ** 2 for t in half)
    return sum((t.step - mean_step) * (t.bytes - mean_bytes) for t in half) / spread / 1e6 * 1e3
