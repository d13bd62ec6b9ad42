"""PipeDream's planner: whole layers in consecutive stages, each stage on one or more workers.

Workers stand in levels: `workers[0]` machines share links of `bandwidths[0]`, `workers[1]` such groups are joined by
`bandwidths[1]`, and so on. With A(i, j, m) the best time per mini-batch for layers i..j-1 on m groups of one level,

    T(i, j, m) = max(A of the level below (i, j, all its workers), 2 (m - 1) weights(i, j) / bandwidth) / m
    A(i, j, m) = min(T(i, j, m), min over s, n of max(A(i, s, m - n), 2 activation(s - 1) / bandwidth, T(s, j, n)))

(Narayanan et al. 2019). Replicas of a stage take mini-batches in turn; messages between stages and the exchange of
gradients travel while workers compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from .chain_partition import split_row
from .layer_costs import LayerCost, Number, as_chain, exact, plain
from .plan import UNEQUAL_REPLICAS, Plan
from .plan_file import plan_to_json

__all__ = ["PlannedStages", "ReplicatedStage", "plan_pipedream", "plan_straight"]

Table = NDArray[np.float64]
Choice = NDArray[np.int64]
_MOST_LAYERS = 128
_PRECISION = 1e-9


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers `first .. end - 1` on `replicas` workers."""

    first: int
    end: int
    replicas: int = 1


@dataclass(frozen=True)
class PlannedStages:
    """Stages from the data to the loss, for layers with given costs, and what follows from them."""

    layers: tuple[LayerCost, ...]
    workers: int
    stages: tuple[ReplicatedStage, ...]
    #: Time per mini-batch in steady state; infinite if no plan that uses all workers can run.
    initiation_interval: Number
    note: str = ""

    @property
    def warmups(self) -> tuple[int, ...]:
        """Forwards that each replica of a stage does before its first backward."""
        return tuple(count - 1 for count in self.versions)

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of each stage: the mini-batches that one replica has under way.

        >>> layer = LayerCost("", 1, 1, 1)
        >>> PlannedStages((layer, layer), 4, (ReplicatedStage(0, 1, 3), ReplicatedStage(1, 2)), 1).versions
        (2, 1)
        """
        after = [sum(s.replicas for s in self.stages[number:]) for number in range(len(self.stages))]
        return tuple(-(-count // stage.replicas) for count, stage in zip(after, self.stages, strict=True))

    @property
    def in_flight(self) -> int:
        """Mini-batches that enter before the first leaves, per replica of the input stage (NOAM)."""
        return self.versions[0]

    @property
    def loads(self) -> tuple[Number, ...]:
        """Time that each worker computes per mini-batch; workers of a stage stand side by side."""
        found: list[Number] = []
        for stage in self.stages:
            work = sum((exact(layer.work) for layer in self.layers[stage.first : stage.end]), Fraction(0))
            share = work / stage.replicas
            found += [share if _is_exact(self.layers) else float(share)] * stage.replicas
        return (*found, *[0] * (self.workers - len(found)))

    @property
    def delays(self) -> tuple[int, ...]:
        """Updates by which each layer's gradient is late, with stashed weights."""
        sizes = [stage.end - stage.first for stage in self.stages]
        return tuple(warm for warm, size in zip(self.warmups, sizes, strict=True) for _ in range(size))

    @property
    def utilisation(self) -> Number:
        """Share of the time that the workers compute, on average."""
        return sum(self.loads, start=0) / (self.workers * self.initiation_interval)

    @property
    def communication_bytes(self) -> Number:
        """Bytes per mini-batch: activations and their gradients between stages, and weights between replicas."""
        borders: list[Number] = [2 * self.layers[stage.first - 1].activation_bytes for stage in self.stages[1:]]
        for stage in self.stages:
            weights = sum((layer.weight_bytes for layer in self.layers[stage.first : stage.end]), start=0)
            # Each of m replicas sends 2 (m - 1) / m of the weights once per m mini-batches.
            borders.append(2 * (stage.replicas - 1) * weights / stage.replicas if stage.replicas > 1 else 0)
        return sum(borders, start=0)

    @property
    def plan(self) -> Plan:
        """The stages as a plan."""
        replicas = tuple(stage.replicas for stage in self.stages)
        several = max(replicas) > 1
        return Plan(
            blocks=tuple(layer.name for layer in self.layers),
            starts=tuple(stage.first for stage in self.stages),
            loads=self.loads,
            replicas=replicas if several else (),
            method="pipedream",
            analysis=UNEQUAL_REPLICAS if len(set(replicas)) > 1 else "",
            note=self.note,
        )

    def to_json(self) -> dict[str, Any]:
        """The plan, and figures about it."""
        return plan_to_json(self.plan) | {
            "devices": self.workers,
            "busy_devices": self.plan.busy_devices,
            "initiation_interval": plain(self.initiation_interval) if self.initiation_interval < math.inf else None,
            "delays": list(self.delays),
            "utilisation": plain(self.utilisation),
            "communication_bytes": plain(self.communication_bytes),
            "versions": list(self.versions),
            "in_flight": self.in_flight,
        }


def plan_straight(costs: Sequence[LayerCost], devices: int) -> PlannedStages:
    """The best cut into at most `devices` stages of one worker each, when messages are free.

    >>> plan = plan_straight([LayerCost("", 1, 1, 1)] * 4, 3)
    >>> plan.initiation_interval, plan.loads, plan.versions
    (Fraction(5, 1), (Fraction(5, 1), Fraction(3, 1), Fraction(3, 1)), (3, 2, 1))
    """
    chain = as_chain(costs)
    sizes = [exact(layer.F) + exact(layer.D) + exact(layer.G) for layer in chain]
    _, parts = split_row(sizes, [False] * len(sizes), devices)
    homes = [part.device for part in parts]
    starts = [n for n, home in enumerate(homes) if n == 0 or home != homes[n - 1]]
    stages = [ReplicatedStage(a, b) for a, b in zip(starts, [*starts[1:], len(chain)], strict=True)]
    return _finish(chain, devices, stages, math.inf)


def plan_pipedream(
    costs: Sequence[LayerCost],
    workers: int | Sequence[int],
    bandwidths: float | Sequence[float] = math.inf,
    *,
    replicate: bool = True,
    fewer: bool = True,
) -> PlannedStages:
    """The best stages, replicas included.

    **Arguments:**

    - `costs`: of the layers, in order; the D of the first is ignored.
    - `workers`: their number; or, for levels of machines, how many at each level, from the innermost.
    - `bandwidths`: bytes per unit of time of each level's links.
    - `replicate`: whether a stage may have several workers.
    - `fewer`: whether workers may stay idle. Otherwise all are used, at whatever cost.

    With free messages and replicas allowed nothing beats data parallelism:

    >>> plan = plan_pipedream([LayerCost("", 1, 1, 1)] * 4, 3)
    >>> plan.stages, plan.initiation_interval
    ((ReplicatedStage(first=0, end=4, replicas=3),), Fraction(11, 3))
    """
    levels = [workers] if isinstance(workers, int) else list(workers)
    links = [bandwidths] * len(levels) if isinstance(bandwidths, int | float) else list(bandwidths)
    counted = bool(levels) and all(isinstance(count, int) and count >= 1 for count in levels)
    if not counted or len(links) != len(levels) or not all(link >= 0 for link in links):
        raise PlanError(
            f"expected for each level a whole number of workers >= 1 and a bandwidth >= 0, got {levels} and {links}"
        )
    chain = as_chain(costs)
    if len(levels) == 1 and fewer:
        stages = _one_level(chain, levels[0], links[0], replicate)
        return _finish(chain, levels[0], stages, links[0])
    tables = _Levels(chain, levels, links, replicate=replicate, fewer=fewer)
    plan = _finish(chain, math.prod(levels), tables.stages(), min(links), tables.time)
    return replace(plan, note=tables.note)


def _one_level(chain: Sequence[LayerCost], workers: int, bandwidth: float, replicate: bool) -> list[ReplicatedStage]:
    """Bisection on the time, with the fewest workers for a given time by dynamic programming: fast for long chains."""
    work = np.concatenate([[0.0], np.cumsum([float(layer.work) for layer in chain])])
    weights = np.concatenate([[0.0], np.cumsum([float(layer.weight_bytes) for layer in chain])])
    cuts = np.array([0.0, *(_transfer(2 * layer.activation_bytes, bandwidth) for layer in chain[:-1])])

    def within(limit: float) -> list[ReplicatedStage] | None:
        usable = np.flatnonzero(cuts <= limit)
        return _fewest_workers(work, weights, usable, limit, workers, workers if replicate else 1, bandwidth)

    low, high = float(work[-1]) / workers, float(work[-1])
    ideal = within(low)
    if ideal is not None:
        return ideal
    # To begin with: one worker, or the best straight pipeline if its messages are fast enough.
    best = [ReplicatedStage(0, len(chain))]
    straight = _finish(chain, workers, plan_straight(chain, workers).stages, bandwidth)
    if straight.initiation_interval < high:
        best, high = list(straight.stages), float(straight.initiation_interval)
    while high - low > _PRECISION * high:
        trial = (low + high) / 2
        stages = within(trial)
        if stages is None:
            low = trial
        else:
            best, high = stages, trial
    return best


def _fewest_workers(
    work: Table, weights: Table, starts: Choice, limit: float, workers: int, widest: int, bandwidth: float
) -> list[ReplicatedStage] | None:
    """Stages that take at most `limit` per mini-batch, on as few workers as possible; among these the fewest stages."""
    limit *= 1 + 1e-12
    count = len(work) - 1
    # Workers first, then stages: one number orders both.
    need = np.full(count + 1, np.inf)
    need[0] = 0
    came, width = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    done, moved = work[starts], weights[starts]
    for end in range(1, count + 1):
        window = slice(np.searchsorted(done, work[end] - limit * widest), np.searchsorted(starts, end))
        spans = np.clip(np.ceil((work[end] - done[window]) / limit), 1.0, widest)
        # More workers than needed would only make the exchange of gradients slower.
        volume = 2 * (spans - 1) * (weights[end] - moved[window])
        usable = (volume <= limit * bandwidth * spans) if bandwidth < math.inf else True
        total = np.where(usable, need[starts[window]] + spans * (count + 1) + 1, np.inf)
        if total.size:
            pick = int(total.argmin())
            need[end], came[end], width[end] = total[pick], starts[window][pick], spans[pick]
    if not need[count] < (workers + 1) * (count + 1):
        return None
    stages = []
    end = count
    while end > 0:
        stages.append(ReplicatedStage(int(came[end]), end, int(width[end])))
        end = int(came[end])
    return stages[::-1]


def _finish(
    chain: Sequence[LayerCost],
    workers: int,
    stages: Sequence[ReplicatedStage],
    bandwidth: float,
    time: float | None = None,
) -> PlannedStages:
    """The plan with the time that its stages take; exact where messages are free."""
    plan = PlannedStages(tuple(chain), workers, tuple(stages), 0)
    times: list[Number] = list(plan.loads)
    if bandwidth < math.inf and time is None:
        times = [float(value) for value in times]
        times += [_transfer(2 * chain[stage.first - 1].activation_bytes, bandwidth) for stage in stages[1:]]
        for stage in stages:
            weights = sum((layer.weight_bytes for layer in chain[stage.first : stage.end]), start=0)
            times.append(_transfer(2 * (stage.replicas - 1) * weights / stage.replicas, bandwidth))
    if time is not None and (bandwidth < math.inf or time == math.inf):
        return replace(plan, initiation_interval=time)
    return replace(plan, initiation_interval=max(times))


def _slowness(bandwidth: float) -> float:
    return math.inf if bandwidth == 0 else 1 / bandwidth


def _transfer(size: Number, bandwidth: float) -> float:
    """Time for `size` bytes; nothing takes no time even over a link that carries nothing."""
    return float(size) * _slowness(bandwidth) if size else 0.0


def _is_exact(layers: Sequence[LayerCost]) -> bool:
    return all(isinstance(value, int | Fraction) for layer in layers for value in (layer.F, layer.D, layer.G))


class _Level(NamedTuple):
    """Tables of one level; the first index of each is the number of groups, then start and end of the run."""

    time: list[Table]
    #: Groups used (fewer than given if that is faster), groups of the last stage, and where that stage starts.
    used: list[Choice]
    width: list[Choice]
    start: list[Choice]


class _Levels:
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

    def stages(self) -> list[ReplicatedStage]:
        """All stages; where a whole pipeline is replicated, so is each of its stages."""
        found = self._stages(len(self.levels) - 1, self.workers[-1], 0, len(self.ends) - 1)
        return [ReplicatedStage(int(self.ends[a]), int(self.ends[b]), count) for a, b, count in found]

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
