"""PipeDream's dynamic program over levels of machines, as tables over all runs of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .layer_costs import LayerCost
from .pipedream_plan import PipeDreamStage

__all__ = ["Levels"]

Table = NDArray[np.float64]
Choice = NDArray[np.int64]
_MOST_LAYERS = 128


class _Level(NamedTuple):
    """Tables of one level; the first index of each is the number of groups, then start and end of the run."""

    time: list[Table]
    #: Groups used (fewer than given if that is faster), groups of the last stage, and where that stage starts.
    used: list[Choice]
    width: list[Choice]
    start: list[Choice]


class Levels:
    """The best plan for levels of workers.

    **Arguments:** as in `plan_pipedream`. Chains of more than 128 layers are first merged into 128 groups of about the
    same work, and `note` says so.
    """

    def __init__(
        self,
        chain: Sequence[LayerCost],
        workers: Sequence[int],
        bandwidths: Sequence[float],
        *,
        replicate: bool,
        fewer: bool,
    ) -> None:
        self.workers = list(workers)
        self.ends = _merge([float(layer.work) for layer in chain])
        merged = len(self.ends) - 1 < len(chain)
        self.note = f"planned on {len(self.ends) - 1} groups of the {len(chain)} layers" if merged else ""
        self.levels: list[_Level] = []
        work = np.concatenate([[0.0], np.cumsum([float(layer.work) for layer in chain])])[self.ends]
        weights = np.concatenate([[0.0], np.cumsum([float(layer.weight_bytes) for layer in chain])])[self.ends]
        sent = np.array([0.0, *(float(layer.activation_bytes) for layer in chain)])[self.ends]
        below = _runs(work)
        for count, bandwidth in zip(workers, bandwidths, strict=True):
            level = _tables(below, _runs(weights), sent, count, bandwidth, replicate, fewer)
            self.levels.append(level)
            below = level.time[count]

    @property
    def time(self) -> float:
        """Time per mini-batch."""
        return float(self.levels[-1].time[self.workers[-1]][0, -1])

    def stages(self) -> list[PipeDreamStage]:
        """All stages; where a whole pipeline is replicated, so is each of its stages."""
        found = self._stages(len(self.levels) - 1, self.workers[-1], 0, len(self.ends) - 1)
        return [PipeDreamStage(int(self.ends[a]), int(self.ends[b]), count) for a, b, count in found]

    def _stages(self, depth: int, groups: int, first: int, end: int) -> list[tuple[int, int, int]]:
        if depth < 0:
            return [(first, end, 1)]
        level = self.levels[depth]
        groups = int(level.used[groups][first, end])
        width, start = int(level.width[groups][first, end]), int(level.start[groups][first, end])
        before = self._stages(depth, groups - width, first, start) if start > first else []
        inner = self._stages(depth - 1, self.workers[depth - 1] if depth else 1, start, end)
        return [*before, *((a, b, count * width) for a, b, count in inner)]


def _tables(
    below: Table, weights: Table, sent: Table, count: int, bandwidth: float, replicate: bool, fewer: bool
) -> _Level:
    size = len(below)
    starts = np.broadcast_to(np.arange(size)[:, None], (size, size))
    with np.errstate(divide="ignore", invalid="ignore"):
        cuts = np.where(sent > 0, 2 * sent / bandwidth, 0.0)
        exchange = np.where((weights > 0) & (weights < np.inf), weights / bandwidth, 0.0)
    level = _Level([np.full((size, size), np.inf)], *([np.zeros((size, size), np.int64)] for _ in range(3)))
    single: list[Table] = [level.time[0]]
    for m in range(1, count + 1):
        alone = np.maximum(below, 2 * (m - 1) * exchange if m > 1 else 0.0) / m
        single.append(alone if replicate or m == 1 else np.full((size, size), np.inf))
        best, width, start = single[m].copy(), np.full((size, size), m), starts.copy()
        for n in range(1, m):
            head = np.maximum(level.time[m - n], cuts[None, :])
            for first in range(size):
                paths = np.maximum(head[first][:, None], single[n])
                pick = paths.argmin(axis=0)
                value = paths[pick, np.arange(size)]
                better = value < best[first]
                best[first, better], width[first, better], start[first, better] = value[better], n, pick[better]
        used = np.full((size, size), m)
        if fewer and m > 1:
            idle = level.time[m - 1] <= best
            best, used = np.where(idle, level.time[m - 1], best), np.where(idle, level.used[m - 1], used)
        level.time.append(best)
        level.used.append(used)
        level.width.append(width)
        level.start.append(start)
    return level


def _runs(ends: Table) -> Table:
    """Entry `[i, j]`: what lies between two positions; infinite if nothing does."""
    runs = ends[None, :] - ends[:, None]
    return np.where(np.tri(len(ends), dtype=bool), np.inf, runs)


def _merge(work: Sequence[float]) -> NDArray[np.int64]:
    """Positions between which layers count as one."""
    if len(work) <= _MOST_LAYERS:
        return np.arange(len(work) + 1)
    done = np.concatenate([[0.0], np.cumsum(work)])
    wanted = np.searchsorted(done, np.linspace(0, done[-1], _MOST_LAYERS + 1)[1:-1])
    return np.unique(np.concatenate([[0], np.clip(wanted, 1, len(work) - 1), [len(work)]]))
