"""The best cut of a row of tasks when messages over the cuts take time.

A run costs its work and what crosses its two ends: in sum if devices wait for messages, otherwise whichever is
longest. For a given limit the fewest runs are found by dynamic programming over all cuts between tasks; the limit by
bisection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..schedule.channel import Channel
from .dataflow import Dataflow, Sizes, cut_bytes
from .layer_costs import LayerCost
from .tasks import Item, Task

__all__ = ["cut_sizes", "linked_interval", "split_linked"]

Vector = NDArray[np.float64]
_PRECISION = 1e-9


def cut_sizes(chain: Sequence[LayerCost], items: Sequence[Item]) -> list[float]:
    """Bytes that cross a cut before each item, both ways together.

    >>> from .tasks import chain_items
    >>> layers = [LayerCost("a", 1, 0, 1, 10, 7), LayerCost("b", 1, 1, 1, 20, 9)]
    >>> cut_sizes(layers, chain_items(layers, "atomic"))
    [0.0, 17.0, 20.0, 39.0, 39.0]
    """
    # Where every item has a device of its own, the borders of the row are all cuts that there are.
    alone = [Task(kind, layer, at, Fraction(1)) for at, item in enumerate(items) for kind, layer in item.tasks]
    found = cut_bytes(Dataflow(alone, len(chain)), Sizes.of(chain), len(items))
    return [0.0, *map(float, found)]


def split_linked(
    chain: Sequence[LayerCost], items: Sequence[Item], devices: int, channel: Channel, known: float = math.inf
) -> list[int] | None:
    """The device of each item, in the best cut between items; fewer devices than there are if that is faster.

    **Arguments:**

    - `known`: an interval that some other placement reaches; `None` is returned if no cut between items does.

    >>> from .tasks import chain_items
    >>> layers = [LayerCost(name, 1, 1, 1, activation_bytes=10) for name in "ab"]
    >>> split_linked(layers, chain_items(layers, "atomic"), 2, Channel(bandwidth=20, overlapped=False))
    [0, 0, 1, 1, 1]
    >>> split_linked(layers, chain_items(layers, "atomic"), 2, Channel(bandwidth=4, overlapped=False))
    [0, 0, 0, 0, 0]
    """
    ends = np.concatenate([[0.0], np.cumsum([float(item.size) for item in items])])
    cuts = np.array([channel.time(size) if size else 0.0 for size in cut_sizes(chain, items)] + [0.0])
    cuts[0] = 0.0
    high = min(float(ends[-1]), known)
    best = _fewest_runs(ends, cuts, high, devices, channel.overlapped)
    if best is None:
        return None
    low = float(ends[-1]) / devices
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        runs = _fewest_runs(ends, cuts, middle, devices, channel.overlapped)
        if runs is None:
            low = middle
        else:
            best, high = runs, middle
    return [device for device, (start, end) in enumerate(best) for _ in range(start, end)]


def linked_interval(loads: Sequence[Fraction], cuts: Sequence[Fraction], channel: Channel) -> float:
    """Time per mini-batch of a row of devices with these loads and these bytes over its borders.

    >>> linked_interval([Fraction(3), Fraction(4)], [Fraction(10)], Channel(bandwidth=5, overlapped=False))
    6.0
    """
    times = [channel.time(float(size)) if size else 0.0 for size in cuts]
    if channel.overlapped:
        return max(float(max(loads)), *times, 0.0)
    edges = [0.0, *times, 0.0]
    return max(float(load) + edges[p] + edges[p + 1] for p, load in enumerate(loads))


def _fewest_runs(
    ends: Vector, cuts: Vector, limit: float, devices: int, overlapped: bool
) -> list[tuple[int, int]] | None:
    """Runs that cost at most `limit` each; `None` if there are more than `devices`."""
    # Rounding must not separate a limit from the sum that it was computed from.
    limit *= 1 + 1e-12
    count = len(ends) - 1
    free = np.zeros(count + 1) if overlapped else cuts
    starts, stops = ends - free, ends + free
    allowed = cuts <= limit if overlapped else np.ones(count + 1, dtype=bool)
    need = np.full(count + 1, np.inf)
    need[0] = 0
    came = np.zeros(count + 1, dtype=np.int64)
    first = np.searchsorted(ends, ends - limit)
    for at in range(1, count + 1):
        if not allowed[at]:
            continue
        window = slice(int(first[at]), at)
        runs = np.where(stops[at] - starts[window] <= limit, need[window], np.inf)
        if runs.size:
            pick = int(runs.argmin())
            need[at], came[at] = runs[pick] + 1, first[at] + pick
    if need[count] > devices:
        return None
    found = []
    at = count
    while at > 0:
        found.append((int(came[at]), at))
        at = int(came[at])
    return found[::-1]
