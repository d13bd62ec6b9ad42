"""What holds for every chain, with brute force as the judge of small ones."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations_with_replacement, product

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerpipe_chains import layers

from unlatch.errors import PlanError
from unlatch.methods.layerpipe.exact import plan_exact
from unlatch.methods.layerpipe.list_schedule import plan_list
from unlatch.plan.dataflow import Dataflow, Sizes, cut_bytes
from unlatch.plan.layer_costs import LayerCost, as_chain, total_work
from unlatch.plan.layerpipe import PlannedTasks, assemble, iteration_bound, pipedream_interval, plan_layerpipe
from unlatch.plan.linked_partition import cut_sizes, linked_interval
from unlatch.plan.tasks import MODES, Task, chain_items
from unlatch.schedule.channel import Channel

modes = st.sampled_from(MODES)
devices = st.integers(1, 8)


def crossing(placed: list[Task], chain: list[LayerCost], count: int) -> list[Fraction]:
    """Bytes over the borders of a row."""
    return cut_bytes(Dataflow(placed, len(chain)), Sizes.of(chain), count)


def check_tasks(plan: PlannedTasks) -> None:
    """Everything once; loads add up; what is needed comes at least a slot earlier from elsewhere."""
    shares: dict[tuple[str, int], Fraction] = {}
    for task in plan.tasks:
        assert 0 <= task.device < plan.devices
        assert task.fraction > 0
        shares[task.kind, task.layer] = shares.get((task.kind, task.layer), Fraction(0)) + task.fraction
    count = len(plan.layers)
    wanted = {("F", n) for n in range(count)} | {("G", n) for n in range(count)} | {("D", n) for n in range(1, count)}
    assert shares == dict.fromkeys(wanted, 1)
    assert sum(plan.loads) == total_work(plan.layers)
    assert max(plan.loads) == plan.initiation_interval
    for before, after in edges(plan):
        assert after.slot - before.slot >= (before.device != after.device), (before, after)


def edges(plan: PlannedTasks) -> Iterator[tuple[Task, Task]]:
    """All pairs of shares of which the second needs something of the first, for the same mini-batch."""
    count = len(plan.layers)
    needs: dict[str, list[tuple[str, int]]] = {
        "F": [("F", -1)],
        "D": [("D", 1), ("F", 0), ("F", -1)],
        "G": [("D", 1), ("F", -1)],
    }
    for after in plan.tasks:
        for kind, step in needs[after.kind]:
            source = ("F", count - 1) if (kind, after.layer + step) == ("D", count) else (kind, after.layer + step)
            yield from ((before, after) for before in plan.tasks if (before.kind, before.layer) == source)


@given(layers(), devices, modes)
@settings(max_examples=150)
def test_plans_are_complete_and_in_time(costs: list[LayerCost], count: int, mode: str) -> None:
    plan = plan_layerpipe(costs, count, mode)
    check_tasks(plan)
    bound = iteration_bound(plan.layers, plan.delays.gradient, plan.tasks)
    assert plan.initiation_interval >= bound
    assert min(plan.delays.gradient) >= 0
    assert min(plan.delays.activation) >= 0
    assert min(plan.delays.weight_stash) >= 0
    homes = {(t.kind, t.layer): t.device for t in plan.tasks if t.kind != "D"}
    last = len(costs) - 1
    if homes["F", last] == homes["G", last]:
        assert plan.delays.gradient[-1] == 0
    # Where every D fits into one interval it lies on one device or on two neighbours.
    for layer in range(1, len(costs)):
        if plan.initiation_interval >= costs[layer].D:
            places = [t.device for t in plan.tasks if (t.kind, t.layer) == ("D", layer)]
            assert places in ([places[0]], [places[0], places[0] + 1])


@given(layers(), devices)
@settings(max_examples=100)
def test_intervals_are_ordered(costs: list[LayerCost], count: int) -> None:
    chain = as_chain(costs)
    divisible = plan_layerpipe(costs, count).initiation_interval
    atomic = plan_layerpipe(costs, count, "atomic").initiation_interval
    largest = max(size for layer in chain for size in (layer.F, layer.G))
    assert max(Fraction(total_work(costs), count), largest) <= divisible <= atomic <= pipedream_interval(costs, count)
    assert plan_layerpipe(costs, count, most_parts=2).initiation_interval <= atomic
    assert plan_layerpipe(costs, count, most_parts=2).initiation_interval >= divisible
    assert plan_list(costs, count).initiation_interval >= plan_exact(costs, count).initiation_interval
    assert plan_exact(costs, count).initiation_interval <= atomic
    assert plan_exact(costs, count, "divisible").initiation_interval <= divisible
    for mode in ("divisible", "atomic"):
        more = plan_layerpipe(costs, count + 1, mode).initiation_interval
        assert more <= plan_layerpipe(costs, count, mode).initiation_interval
    assert pipedream_interval(costs, 1) == plan_layerpipe(costs, 1).initiation_interval == total_work(costs)


@given(layers(most=4))
def test_saturation(costs: list[LayerCost]) -> None:
    chain = as_chain(costs)
    largest = max(size for layer in chain for size in (layer.F, layer.D, layer.G))
    assert plan_layerpipe(costs, 3 * len(costs), "atomic").initiation_interval == largest


def every_cut(count: int, runs: int) -> Iterator[list[int]]:
    """Devices of `count` items in a row, over at most `runs` devices."""
    for cuts in combinations_with_replacement(range(count + 1), runs - 1):
        yield [sum(at >= cut for cut in cuts) for at in range(count)]


@given(layers(most=3, smallest=0), st.integers(1, 4))
@settings(max_examples=80)
def test_whole_tasks_against_every_cut(costs: list[LayerCost], count: int) -> None:
    if not any(layer.work for layer in [LayerCost("", costs[0].F, 0, costs[0].G), *costs[1:]]):
        with pytest.raises(PlanError, match="all costs are zero"):
            plan_layerpipe(costs, count)
        return
    items = chain_items(as_chain(costs), "atomic")
    best = min(
        max(sum((i.size for i, at in zip(items, homes, strict=True) if at == p), Fraction(0)) for p in range(count))
        for homes in every_cut(len(items), count)
    )
    assert plan_layerpipe(costs, count, "atomic").initiation_interval == best


@given(layers(most=3, largest=4), st.integers(1, 4), st.sampled_from([None, 2]))
@settings(max_examples=60)
def test_divisible_tasks_against_a_grid(costs: list[LayerCost], count: int, most_parts: int | None) -> None:
    """The interval is feasible, and one that is smaller by less than any two candidates differ is not.

    Judged by a search over all cuts at multiples of 1 / grid inside a D.
    """
    items = chain_items(as_chain(costs), "divisible")
    found = plan_layerpipe(costs, count, most_parts=most_parts).initiation_interval
    grid = 12  # a multiple of all denominators up to 4
    assert (found * grid).denominator == 1
    borders = {0}
    position, ends = 0, [0]
    for item in items:
        size = int(item.size * grid)
        borders |= set(range(position, position + size)) if item.divisible else {position}
        position += size
        ends.append(position)
    spans = [(a, b) for a, b, item in zip(ends, ends[1:], items, strict=False) if item.divisible]

    def allowed(cuts: tuple[int, ...]) -> bool:
        return most_parts is None or all(len({c for c in cuts if a < c < b}) < most_parts for a, b in spans)

    best = min(
        max(b - a for a, b in zip((0, *cuts), (*cuts, position), strict=True))
        for cuts in combinations_with_replacement(sorted(borders | {position}), count - 1)
        if allowed(cuts)
    )
    assert found == Fraction(best, grid)


@given(layers(most=3, largest=5), st.integers(1, 3))
@settings(max_examples=40)
def test_exact_against_every_placement(costs: list[LayerCost], count: int) -> None:
    items = chain_items(as_chain(costs), "atomic")
    best = min(
        max(sum((i.size for i, at in zip(items, homes, strict=True) if at == p), Fraction(0)) for p in range(count))
        for homes in product(range(count), repeat=len(items))
    )
    plan = plan_exact(costs, count, time_limit=100)
    assert (plan.initiation_interval, plan.proven) == (best, True)
    check_tasks(plan)
    check_tasks(plan_exact(costs, count, "divisible"))
    assert plan_list(costs, count).initiation_interval <= best * (Fraction(4, 3) - Fraction(1, 3 * count))


@given(layers(most=3), st.integers(1, 4), st.booleans(), st.sampled_from(["atomic", "factor"]))
@settings(max_examples=60)
def test_messages_that_take_time_against_every_cut(
    costs: list[LayerCost], count: int, overlapped: bool, mode: str
) -> None:
    channel = Channel(bandwidth=20, latency=0.5, overlapped=overlapped)
    chain = as_chain(costs)
    items = chain_items(chain, mode)
    values = []
    for homes in every_cut(len(items), count):
        # Devices without work in between cost nothing and pass nothing on.
        used = sorted(set(homes))
        placed = [Task(*i.tasks[0], used.index(at), Fraction(1)) for i, at in zip(items, homes, strict=True)]
        loads = [sum((i.size for i, at in zip(items, homes, strict=True) if at == p), Fraction(0)) for p in used]
        values.append(linked_interval(loads, crossing(placed, chain, len(used)), channel))
    plan = plan_layerpipe(costs, count, mode, channel=channel)
    assert plan.initiation_interval == pytest.approx(min(values), rel=1e-9)
    divisible = plan_layerpipe(costs, count, channel=channel).initiation_interval
    assert divisible <= plan.initiation_interval * (1 + 1e-9)


@given(layers(most=5))
def test_bytes_over_a_cut_are_those_of_the_tasks_beside_it(costs: list[LayerCost]) -> None:
    chain = as_chain(costs)
    items = chain_items(chain, "atomic")
    for cut, size in enumerate(cut_sizes(chain, items)):
        placed = [Task(*item.tasks[0], int(at >= cut), Fraction(1)) for at, item in enumerate(items)]
        if cut:
            assert sum(crossing(placed, chain, 2)) == size


@given(layers(most=6), st.lists(st.integers(1, 5), min_size=5, max_size=5))
def test_whole_layers_give_two_slots_per_stage(costs: list[LayerCost], cuts: list[int]) -> None:
    """The stage-wise delay law 2 S(l), from the general rule for slots."""
    count = len(costs)
    homes = [sum(n >= cut for cut in sorted(set(cuts))) for n in range(count)]
    homes = [sorted(set(homes)).index(home) for home in homes]
    items = chain_items(as_chain(costs), "atomic")
    placed = [Task(*item.tasks[0], homes[item.tasks[0][1]], Fraction(1)) for item in items]
    plan = assemble(as_chain(costs), max(homes) + 1, "atomic", placed)
    assert plan.delays.gradient == tuple(2 * (homes[-1] - home) for home in homes)
    assert plan.delays.activation == plan.delays.gradient


def delays_in_place(plan: PlannedTasks) -> networkx.DiGraph:
    """What needs what, with the delay of every edge before tasks were placed and as their slots make it.

    Weights are nodes of their own, where and when the forward reads them; an update is in force one slot after its G.
    """
    forward = {task.layer: task for task in plan.tasks if task.kind == "F"}
    graph = networkx.DiGraph()
    for before, after in edges(plan):
        graph.add_edge(before, after, inserted=0, now=after.slot - before.slot)
    for task in plan.tasks:
        weights = forward[task.layer]._replace(device=-1)
        if task.kind == "G":
            graph.add_edge(task, weights, inserted=1 + plan.delays.gradient[task.layer], now=1)
        else:
            graph.add_edge(weights, task, inserted=0, now=task.slot - weights.slot)
    return graph


@given(layers(most=4), devices, st.sampled_from(["divisible", "atomic"]))
@settings(max_examples=60)
def test_retiming_leaves_the_delays_round_every_loop_as_they_were(
    costs: list[LayerCost], count: int, mode: str
) -> None:
    """Invariant 5.5.4: a delay is moved and not made; none is negative; one at least between devices."""
    plan = plan_layerpipe(costs, count, mode)
    graph = delays_in_place(plan)
    for before, after, delay in graph.edges(data="now"):
        assert delay >= (-1 not in (before.device, after.device) and before.device != after.device)
    loops = list(networkx.simple_cycles(graph))
    for loop in loops:
        along = [graph.edges[edge] for edge in zip(loop, [*loop[1:], loop[0]], strict=True)]
        assert sum(edge["now"] for edge in along) == sum(edge["inserted"] for edge in along)
    # Round each layer at least: its weights, all forwards from there on, the gradients back to it.
    assert len(loops) >= len(costs)
    kept = [
        max((graph.edges[w, d]["now"] for w, d in graph.edges if w.device == -1 and d[:2] == ("D", layer)), default=0)
        for layer in range(len(costs))
    ]
    assert kept == list(plan.delays.weight_stash)


@given(layers(most=4), devices, st.sampled_from(["divisible", "atomic"]))
@settings(max_examples=60)
def test_the_last_layer_is_late_only_where_its_gradient_is_taken_elsewhere(
    costs: list[LayerCost], count: int, mode: str
) -> None:
    """Invariant 5.5.4 at the end of the chain: no slot lies between F and G of one device, one at least otherwise."""
    plan = plan_layerpipe(costs, count, mode)
    home = {task.kind: task.device for task in plan.tasks if task.layer == len(costs) - 1}
    assert (plan.delays.gradient[-1] == 0) == (home["F"] == home["G"])
