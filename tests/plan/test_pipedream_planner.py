"""PipeDream's planner against brute force, and the limits in which its answer is known."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from itertools import combinations, product
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerpipe_chains import UNIT, layers

from unlatch.errors import PlanError
from unlatch.plan.layer_costs import LayerCost, as_chain, total_work
from unlatch.plan.pipedream import PlannedStages, ReplicatedStage, plan_pipedream, plan_straight


def transfer(size: float, bandwidth: float) -> float:
    if not size:
        return 0.0
    return math.inf if bandwidth == 0 else size / bandwidth


def brute_force(costs: list[LayerCost], workers: int, bandwidth: float, replicate: bool, fewer: bool) -> float:
    """All stages with all replicas."""
    chain = as_chain(costs)
    best = math.inf
    for count in range(1, len(chain) + 1):
        for cuts in combinations(range(1, len(chain)), count - 1):
            borders = [0, *cuts, len(chain)]
            for widths in product(range(1, workers + 1), repeat=count):
                total = sum(widths)
                if total > workers or (not fewer and total < workers) or (not replicate and max(widths) > 1):
                    continue
                best = min(best, slowest(chain, borders, widths, bandwidth))
    return best


def slowest(chain: list[LayerCost], borders: list[int], widths: tuple[int, ...], bandwidth: float) -> float:
    times = [transfer(2 * chain[cut - 1].activation_bytes, bandwidth) for cut in borders[1:-1]]
    for first, end, width in zip(borders, borders[1:], widths, strict=False):
        part = chain[first:end]
        times.append(sum(layer.work for layer in part) / width)
        times.append(transfer(2 * (width - 1) / width * sum(layer.weight_bytes for layer in part), bandwidth))
    return max(times)


@given(layers(most=5), st.integers(1, 4), st.sampled_from([0, 0.5, 3, 20, math.inf]), st.booleans(), st.booleans())
@settings(max_examples=80)
def test_against_all_plans(
    costs: list[LayerCost], workers: int, bandwidth: float, replicate: bool, fewer: bool
) -> None:
    plan = plan_pipedream(costs, workers, bandwidth, replicate=replicate, fewer=fewer)
    best = brute_force(costs, workers, bandwidth, replicate, fewer)
    assert float(plan.initiation_interval) == pytest.approx(best, rel=1e-8)
    if best < math.inf:
        borders = [0, *(stage.end for stage in plan.stages)]
        widths = tuple(stage.replicas for stage in plan.stages)
        assert slowest(list(plan.layers), borders, widths, bandwidth) == pytest.approx(best, rel=1e-8)
        assert sum(widths) <= workers


def recursion(costs: list[LayerCost], workers: list[int], bandwidths: list[float], fewer: bool) -> float:
    """The planner's formula, term by term."""
    chain = as_chain(costs)

    @cache
    def stage(level: int, i: int, j: int, m: int) -> float:
        below = best(level - 1, i, j, workers[level - 1]) if level else sum(layer.work for layer in chain[i:j])
        weights = sum(layer.weight_bytes for layer in chain[i:j])
        return max(below, transfer(2 * (m - 1) * weights, bandwidths[level])) / m

    @cache
    def best(level: int, i: int, j: int, m: int) -> float:
        options = [stage(level, i, j, m)]
        for s in range(i + 1, j):
            cut = transfer(2 * chain[s - 1].activation_bytes, bandwidths[level])
            options += [max(best(level, i, s, m - n), cut, stage(level, s, j, n)) for n in range(1, m)]
        if fewer and m > 1:
            options.append(best(level, i, j, m - 1))
        return min(options)

    return best(len(workers) - 1, 0, len(chain), workers[-1])


bandwidths = st.sampled_from([0.0, 1.0, 5.0, 50.0, math.inf])


@given(layers(most=4), st.lists(st.integers(1, 3), min_size=2, max_size=3), st.data(), st.booleans())
@settings(max_examples=40)
def test_levels_against_the_formula(
    costs: list[LayerCost], workers: list[int], data: st.DataObject, fewer: bool
) -> None:
    speeds = [data.draw(bandwidths) for _ in workers]
    plan = plan_pipedream(costs, workers, speeds, fewer=fewer)
    assert float(plan.initiation_interval) == pytest.approx(recursion(costs, workers, speeds, fewer), rel=1e-9)
    if plan.initiation_interval < math.inf:
        used = sum(stage.replicas for stage in plan.stages)
        assert used <= math.prod(workers) if fewer else used == math.prod(workers)
        assert [stage.first for stage in plan.stages[1:]] == [stage.end for stage in plan.stages[:-1]]
        assert max(plan.loads) <= plan.initiation_interval * (1 + 1e-9)


@given(layers(most=5), st.integers(1, 4), bandwidths)
@settings(max_examples=30)
def test_a_level_of_one_changes_nothing(costs: list[LayerCost], workers: int, bandwidth: float) -> None:
    flat = float(plan_pipedream(costs, workers, bandwidth).initiation_interval)
    for levels in ([workers, 1], [1, workers]):
        plan = plan_pipedream(costs, levels, [bandwidth, bandwidth])
        assert float(plan.initiation_interval) == pytest.approx(flat, rel=1e-8)


@given(layers(most=8), st.integers(1, 8))
@settings(max_examples=60)
def test_straight_is_the_best_contiguous_partition(costs: list[LayerCost], workers: int) -> None:
    sizes = [layer.work for layer in as_chain(costs)]
    best = min(
        max(sum(sizes[a:b]) for a, b in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for parts in range(1, min(workers, len(sizes)) + 1)
        for cuts in combinations(range(1, len(sizes)), parts - 1)
    )
    assert plan_straight(costs, workers).initiation_interval == best
    assert plan_pipedream(costs, workers, replicate=False).initiation_interval == best


@given(layers(), st.integers(1, 9))
def test_free_messages_make_it_data_parallel(costs: list[LayerCost], workers: int) -> None:
    plan = plan_pipedream(costs, workers)
    assert plan.stages == (ReplicatedStage(0, len(costs), workers),)
    assert plan.initiation_interval == Fraction(total_work(costs), workers)
    assert plan.utilisation == 1


def test_no_bandwidth_leaves_one_worker() -> None:
    plan = plan_pipedream(UNIT, 4, 0)
    assert plan.stages == (ReplicatedStage(0, 4, 1),)
    assert plan.initiation_interval == 11
    stuck = plan_pipedream(UNIT, 4, 0, fewer=False)
    assert stuck.initiation_interval == math.inf
    assert stuck.to_json()["initiation_interval"] is None


def test_versions_and_minibatches_in_flight() -> None:
    straight = plan_straight(UNIT, 4)
    assert (straight.versions, straight.warmups, straight.in_flight) == ((4, 3, 2, 1), (3, 2, 1, 0), 4)
    assert straight.delays == (3, 2, 1, 0)
    uneven = PlannedStages(tuple(UNIT), 4, (ReplicatedStage(0, 2, 3), ReplicatedStage(2, 4)), 4)
    assert (uneven.versions, uneven.in_flight) == ((2, 1), 2)


def test_a_slow_outer_level_is_crossed_once() -> None:
    """Two machines of two workers: weights are exchanged inside a machine, small activations between."""
    costs = [LayerCost(str(n), 10, 10, 10, activation_bytes=1, weight_bytes=100) for n in range(4)]
    plan = plan_pipedream(costs, [2, 2], [1000, 1])
    assert [(s.first, s.end, s.replicas) for s in plan.stages] == [(0, 2, 2), (2, 4, 2)]
    assert plan.initiation_interval == pytest.approx(30)


def test_bytes() -> None:
    costs = [LayerCost(str(n), 1, 1, 1, activation_bytes=10 * (n + 1), weight_bytes=6) for n in range(3)]
    plan = PlannedStages(tuple(as_chain(costs)), 4, (ReplicatedStage(0, 2, 3), ReplicatedStage(2, 3)), 4)
    assert plan.communication_bytes == 2 * 20 + 2 * 2 * 12 / 3
    assert plan.plan.split == ("2",)
    assert (plan.to_json()["starts"], plan.to_json()["replicas"]) == ([0, 2], [3, 1])
    assert "plan without --replicate" in plan.plan.analysis


def test_wrong_levels_are_refused() -> None:
    with pytest.raises(PlanError, match="for each level"):
        plan_pipedream(UNIT, [2, 2], [1.0])
    with pytest.raises(PlanError, match="for each level"):
        plan_pipedream(UNIT, 0)
    for endless in ([math.inf], [2, math.inf], [math.nan], [2.5]):
        with pytest.raises(PlanError, match="a whole number of workers"):
            plan_pipedream(UNIT, endless, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="for each level"):
        plan_pipedream(UNIT, [2, 2], [1.0, math.nan])


def test_long_chains() -> None:
    costs = [LayerCost(str(n), 1 + n % 7, 1 + n % 5, 1 + n % 3, 100 + n % 11, 50) for n in range(600)]
    started = process_time()
    flat = plan_pipedream(costs, 32, 100)
    levels = plan_pipedream(costs, [4, 8], [100, 50])
    assert process_time() - started < 20
    assert "128 groups" in levels.note
    assert total_work(costs) / 32 <= flat.initiation_interval <= levels.initiation_interval
