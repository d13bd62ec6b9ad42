"""The plan as users see it: JSON, communication, stashes, the factor split, errors, and speed."""

from __future__ import annotations

import json
from fractions import Fraction
from time import process_time

import pytest
from layerpipe_chains import MIXED, UNIT

from unlatch.errors import PlanError, ScheduleError
from unlatch.methods.layerpipe.exact import plan_exact
from unlatch.methods.layerpipe.list_schedule import plan_list
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import assemble, plan_layerpipe
from unlatch.plan.networks import mac_costs, network_shapes
from unlatch.schedule.channel import Channel

# a_l = 100 + l, W_l = 10 (l + 1), l from 0
SIZED = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=100 + n, weight_bytes=10 * (n + 1)) for n in range(4)]


def test_json() -> None:
    answer = json.loads(json.dumps(plan_layerpipe(UNIT, 4).to_json()))
    assert answer["initiation_interval"] == 2.75
    assert answer["loads"] == [2.75] * 4
    assert answer["delays"] == [6, 4, 2, 0]
    assert answer["utilisation"] == 1
    assert answer["communication_bytes"] == sum(answer["cut_bytes"])
    assert answer["tasks"][2] == {"task": "D", "layer": 1, "device": 0, "fraction": 0.75, "slot": 6}
    assert answer["blocks"] == [layer.name for layer in UNIT]
    assert len(answer["tasks"]) == 11 + 3


def test_what_training_cannot_follow_is_marked_when_it_is_made() -> None:
    shared = plan_layerpipe(UNIT, 4)
    assert shared.plan.analysis == ""
    bent = assemble(shared.layers, 4, "divisible", shared.tasks, linear=[True, True, False, True])
    assert "plan with --mode atomic" in bent.plan.analysis
    assert plan_layerpipe(UNIT, 4, linear=[True, True, False, True]).plan.analysis == ""
    assert "plan with --placement row" in plan_list(UNIT, 3, "atomic").plan.analysis
    with pytest.raises(PlanError, match="for analysis only: the input gradient"):
        bent.plan.check()


def test_bytes_of_a_shared_input_gradient() -> None:
    """a_{l-1} + (1-x) delta_l + x delta_{l-1} + W_l, here l = 2 (from 0) and x = 1/2: shares are rows of the batch, so
    the place below needs its rows of delta_l and all weights."""
    assert plan_layerpipe(SIZED, 2).communication_bytes == 101 + Fraction(102, 2) + Fraction(101, 2) + 30


def test_bytes_of_whole_tasks() -> None:
    """{F1 G1}{D2 F2}{G2 D3}{F3 G3}{D4 F4}{G4}: a border of layers, F|G, D|F, a border, F|G at the loss."""
    a, w = [100, 101, 102, 103], [10, 20, 30, 40]
    cuts = [
        2 * a[0],
        a[0] + a[1] + a[1] + w[1],
        a[1] + a[2] + w[2],
        2 * a[2],
        a[2] + a[3] + w[3],
    ]
    assert plan_layerpipe(SIZED, 6, "atomic").cut_bytes == tuple(cuts)


def test_idle_processors_are_listed() -> None:
    plan = plan_layerpipe(UNIT, 20, "atomic")
    assert len(plan.loads) == 20
    assert plan.loads.count(0) == 9
    assert plan.utilisation == Fraction(11, 20)


def test_stash_bytes() -> None:
    plan = plan_layerpipe(SIZED, 4)
    weights = 5 * 20 + 3 * 30 + 1 * 40
    inputs = 4 * 100 + 2 * 101 + 0
    assert plan.stash_bytes == weights + inputs


def test_factor_split_moves_the_elementwise_part_below() -> None:
    layers = [LayerCost(f"l{n}", 4, 6, 4, hadamard=2) for n in range(3)]
    plan = plan_layerpipe(layers, 3, "factor")
    homes = {(t.kind, t.layer): t.device for t in plan.tasks}
    assert [homes["H", n] == homes["G", n] for n in range(2)] == [True, True]
    assert ("H", 2) not in homes
    assert sum(plan.loads) == 4 * 6 + 2 * 6
    work = {"F": 4, "G": 4, "D": 4, "H": 2}
    for device, load in enumerate(plan.loads):
        assert load == sum(work[t.kind] for t in plan.tasks if t.device == device)
    slots = {(t.kind, t.layer): t.slot for t in plan.tasks}
    assert all(slots["H", n] <= min(slots["G", n], slots.get(("D", n), 99)) for n in range(2))
    assert plan.delays.gradient == tuple(slots["G", n] - slots["F", n] for n in range(3))


def test_a_long_input_gradient_needs_more_than_two_processors_unless_forbidden() -> None:
    layers = [LayerCost("a", 1, 0, 1), LayerCost("b", 1, 20, 1)]
    free, two = plan_layerpipe(layers, 4), plan_layerpipe(layers, 4, most_parts=2)
    assert (free.initiation_interval, two.initiation_interval) == (6, 10)
    assert sorted(t.device for t in two.tasks if t.kind == "D") == [1, 2]
    assert len([t for t in free.tasks if t.kind == "D"]) == 4


def test_slow_links_lead_to_fewer_processors() -> None:
    layers = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=1000) for n in range(4)]
    assert plan_layerpipe(layers, 4, channel=Channel(bandwidth=1, overlapped=False)).initiation_interval == 11
    fast = plan_layerpipe(layers, 4, channel=Channel(bandwidth=1e9, overlapped=False))
    assert fast.initiation_interval == pytest.approx(2.75, rel=1e-5)


def test_overlapped_links_bound_the_interval() -> None:
    layers = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=10) for n in range(4)]
    plan = plan_layerpipe(layers, 4, "atomic", channel=Channel(bandwidth=5))
    assert plan.initiation_interval == 4.0


def test_list_and_exact_beat_neighbours() -> None:
    """Loads 1 2 4 3 on 3 devices: 12 in a row of whole tasks, 10 anywhere."""
    assert plan_layerpipe(MIXED, 3, "atomic").initiation_interval == 12
    exact = plan_exact(MIXED, 3, time_limit=100)
    assert (exact.initiation_interval, exact.proven, exact.contiguous) == (10, True, False)
    assert plan_list(MIXED, 3).initiation_interval >= 10
    assert exact.communication_bytes == 0
    divisible = plan_list(MIXED, 3, "divisible")
    assert (divisible.initiation_interval, divisible.proven) == (Fraction(29, 3), True)


def test_exact_proves_vgg16_on_nine() -> None:
    plan = plan_exact(mac_costs(network_shapes("vgg16")), 9, time_limit=100)
    assert plan.proven


def test_exact_stops_in_time_and_says_so() -> None:
    layers = [LayerCost(str(n), 1000 + 37 * n % 91, 900 + 53 * n % 89, 800 + 71 * n % 97) for n in range(40)]
    started = process_time()
    plan = plan_exact(layers, 7, time_limit=0.2)
    assert process_time() - started < 20
    assert plan.initiation_interval <= plan_list(layers, 7).initiation_interval


def test_decimal_costs_stay_decimal() -> None:
    layers = [LayerCost(str(n), 0.1, 0.1, 0.1) for n in range(4)]
    assert plan_layerpipe(layers, 4).initiation_interval == 0.275
    assert plan_layerpipe(layers, 1).initiation_interval == 1.1


@pytest.mark.parametrize(("count", "mode", "message"), [(0, "atomic", "at least 1"), (2, "atomc", "'atomic'")])
def test_wrong_arguments(count: int, mode: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_layerpipe(UNIT, count, mode)
    with pytest.raises(PlanError, match=message):
        plan_list(UNIT, count, mode)


def test_a_link_needs_a_bandwidth() -> None:
    with pytest.raises(ScheduleError, match="bandwidth above 0"):
        Channel(bandwidth=0)


def test_a_long_chain_is_planned_quickly() -> None:
    """The benchmark measures it; here only that nothing is quadratic in Python."""
    layers = [LayerCost(str(n), 1 + n % 13 / 7, 1 + n % 11 / 3, 1 + n % 17 / 5, 100, 50) for n in range(1000)]
    for mode in ("divisible", "atomic", "factor"):
        started = process_time()
        plan_layerpipe(layers, 64, mode)
        assert process_time() - started < 10
