"""The best cut of a chain into consecutive parts: the slowest part sets the pace, so make it as fast as possible.

Exact dynamic programming over all cuts, in two passes. The first finds the smallest possible cost of the dearest part.
The second, among the cuts that reach it, evens out the others by the least sum of squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError

__all__ = ["contiguous_split", "part_costs"]

Matrix = NDArray[np.float64]


def contiguous_split(
    costs: Sequence[float],
    parts: int,
    *,
    last: Sequence[float] | None = None,
    borders: Sequence[float] | None = None,
    overlapped: bool = False,
) -> list[int]:
    """Cut items into `parts` non-empty runs such that the largest cost of a run is as small as possible.

    **Arguments:**

    - `costs`: cost of each item.
    - `parts`: number of runs.
    - `last`: cost of each item if it is in the last run; same as `costs` by default.
    - `borders`: cost of a border before each item, paid by the runs on both sides. The first entry is ignored.
    - `overlapped`: whether a border is paid for beside the work, so that a run costs whichever is longest.

    **Returns:**

    The position at which each run starts. Among equally good cuts the evenest is taken, and of these the one that cuts
    earliest.

    >>> contiguous_split([1, 1, 1, 1, 4], 2)
    [0, 4]
    >>> contiguous_split([2, 2, 2, 2], 2, last=[1, 1, 1, 1])
    [0, 1]
    >>> contiguous_split([1, 1, 1, 1], 2, borders=[0, 1, 9, 9], overlapped=True)
    [0, 1]
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise PlanError(f"{count} blocks can be cut into 1 to {count} stages, not {parts}: every stage needs a block")
    inner = _run_costs(costs, borders, is_last=False, overlapped=overlapped)
    final = _run_costs(last or costs, borders, is_last=True, overlapped=overlapped)
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    for part in range(parts):
        best = np.maximum(best[:, None], final if part == parts - 1 else inner).min(axis=0)
    limit = best[count]
    # A power of two: squares neither overflow nor lose ties.
    unit = 2.0 ** int(np.frexp(limit)[1])

    squares = np.full(count + 1, np.inf)
    squares[0] = 0.0
    choices = []
    inner, final = (np.where(runs <= limit, (runs / unit) ** 2, np.inf) for runs in (inner, final))
    for part in range(parts):
        sums = squares[:, None] + (final if part == parts - 1 else inner)
        choices.append(sums.argmin(axis=0))
        squares = sums.min(axis=0)
    starts = []
    end = count
    for choice in reversed(choices):
        end = int(choice[end])
        starts.append(end)
    return starts[::-1]


def part_costs(
    costs: Sequence[float],
    starts: Sequence[int],
    *,
    last: Sequence[float] | None = None,
    borders: Sequence[float] | None = None,
) -> list[float]:
    """The cost of each part of a given cut, counted as in `contiguous_split`.

    >>> part_costs([1, 2, 3, 4], [0, 2], last=[1, 1, 1, 1])
    [3.0, 2.0]
    """
    ends = [*starts[1:], len(costs)]
    found = []
    for part, (start, end) in enumerate(zip(starts, ends, strict=True)):
        items = last if last is not None and part == len(starts) - 1 else costs
        edges = [borders[at] for at in (start, end) if 0 < at < len(costs)] if borders is not None else []
        found.append(float(sum(items[start:end]) + sum(edges)))
    return found


def _run_costs(costs: Sequence[float], borders: Sequence[float] | None, *, is_last: bool, overlapped: bool) -> Matrix:
    """Entry `[i, j]`: the cost of items `i..j-1` as one run; infinite if empty."""
    count = len(costs)
    values = np.asarray([*costs, *(borders or [])], dtype=np.float64)
    if not np.isfinite(values).all() or (values < 0).any():
        raise PlanError(f"costs must be finite and not negative, got {[float(value) for value in values]}")
    sums = np.array([0.0, *accumulate(float(cost) for cost in costs)])
    runs: Matrix = sums[None, :] - sums[:, None]
    if borders is not None:
        edges = np.array([0.0, *borders[1:], 0.0])
        paid = np.maximum(edges[:, None], edges[None, :]) if overlapped else edges[:, None] + edges[None, :]
        runs = np.maximum(runs, paid) if overlapped else runs + paid
    runs[np.tri(count + 1, dtype=bool)] = np.inf
    if is_last:
        runs[:, :count] = np.inf
    return runs
