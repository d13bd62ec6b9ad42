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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from .chain_partition import split_row
from .layer_costs import LayerCost, Number, as_chain, exact
from .pipedream_levels import Levels
from .pipedream_plan import PipeDreamPlan, PipeDreamStage

__all__ = ["plan_pipedream", "plan_straight"]

Table = NDArray[np.float64]
Choice = NDArray[np.intp]
_PRECISION = 1e-9


def plan_straight(costs: Sequence[LayerCost], processors: int) -> PipeDreamPlan:
    """The best cut into at most `processors` stages of one worker each, when messages are free.

    >>> plan = plan_straight([LayerCost("", 1, 1, 1)] * 4, 3)
    >>> plan.initiation_interval, plan.loads, plan.versions
    (Fraction(5, 1), (Fraction(5, 1), Fraction(3, 1), Fraction(3, 1)), (3, 2, 1))
    """
    chain = as_chain(costs)
    sizes = [exact(layer.F) + exact(layer.D) + exact(layer.G) for layer in chain]
    _, parts = split_row(sizes, [False] * len(sizes), processors)
    homes = [part.processor for part in parts]
    starts = [n for n, home in enumerate(homes) if n == 0 or home != homes[n - 1]]
    stages = [PipeDreamStage(a, b) for a, b in zip(starts, [*starts[1:], len(chain)], strict=True)]
    return _finish(chain, processors, stages, math.inf)


def plan_pipedream(
    costs: Sequence[LayerCost],
    workers: int | Sequence[int],
    bandwidths: float | Sequence[float] = math.inf,
    *,
    replicate: bool = True,
    fewer: bool = True,
) -> PipeDreamPlan:
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
    ((PipeDreamStage(first=0, end=4, replicas=3),), Fraction(11, 3))
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
    tables = Levels(chain, levels, links, replicate=replicate, fewer=fewer)
    plan = _finish(chain, math.prod(levels), tables.stages(), min(links), tables.time)
    return replace(plan, note=tables.note)


def _one_level(chain: Sequence[LayerCost], workers: int, bandwidth: float, replicate: bool) -> list[PipeDreamStage]:
    """Bisection on the time, with the fewest workers for a given time by dynamic programming: fast for long chains."""
    work = np.concatenate([[0.0], np.cumsum([float(layer.work) for layer in chain])])
    weights = np.concatenate([[0.0], np.cumsum([float(layer.weight_bytes) for layer in chain])])
    cuts = np.array([0.0, *(_transfer(2 * layer.activation_bytes, bandwidth) for layer in chain[:-1])])

    def within(limit: float) -> list[PipeDreamStage] | None:
        usable = np.flatnonzero(cuts <= limit)
        return _fewest_workers(work, weights, usable, limit, workers, workers if replicate else 1, bandwidth)

    low, high = float(work[-1]) / workers, float(work[-1])
    ideal = within(low)
    if ideal is not None:
        return ideal
    # To begin with: one worker, or the best straight pipeline if its messages are fast enough.
    best = [PipeDreamStage(0, len(chain))]
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
) -> list[PipeDreamStage] | None:
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
        stages.append(PipeDreamStage(int(came[end]), end, int(width[end])))
        end = int(came[end])
    return stages[::-1]


def _finish(
    chain: Sequence[LayerCost],
    workers: int,
    stages: Sequence[PipeDreamStage],
    bandwidth: float,
    time: float | None = None,
) -> PipeDreamPlan:
    """The plan with the time that its stages take; exact where messages are free."""
    plan = PipeDreamPlan(tuple(chain), workers, tuple(stages), 0)
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
