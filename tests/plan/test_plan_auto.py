"""The ranking of methods: every method of the library, with times, memory and risk that can be checked by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layerpipe_chains import layers

from unlatch import methods
from unlatch.advise.advice import ELSEWHERE
from unlatch.advise.prediction import simulate_method
from unlatch.advise.ranking import RISKS, USUAL, plan_auto
from unlatch.config import from_mapping
from unlatch.errors import PlanError
from unlatch.methods import DTRP, LayerPipe, PipeDream, get
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.networks import mac_costs, network_shapes
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine
from unlatch.schedule.stability import Lag, Motion, chain_limit

LAYERS = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=80, weight_bytes=100) for n in range(8)]


def test_every_method_is_ranked() -> None:
    plan = plan_auto(LAYERS, 4, batch_size=64)
    assert {one.method for one in plan.ranking} | set(plan.refused) == set(methods.names())
    assert not plan.refused
    assert [one.key for one in plan.ranking] == sorted(one.key for one in plan.ranking)
    assert all(one.risk in RISKS and one.why for one in plan.ranking)
    json.dumps(plan.to_json(), allow_nan=False)


def test_train_accepts_every_answer() -> None:
    for one in plan_auto(LAYERS, 4, batch_size=64).ranking:
        config = from_mapping({"model": {"name": "mlp"}, **one.to_config()})
        chosen = methods.get(config.method.name, **config.method.options)
        assert chosen.microbatches == one.plan.options["microbatches"]
        assert config.run.stages == one.stages
        if one.plan.split:
            assert len(config.run.split) == one.stages - 1


def test_times_by_hand() -> None:
    """23 units of work on 4 devices; every stage has two layers, 6 units, the first only 5."""
    assert simulate_method("bp", LAYERS, 4).time_per_batch == 23
    assert simulate_method("pipedream", LAYERS, 4).time_per_batch == 6
    assert simulate_method(LayerPipe(microbatches=1), LAYERS, 4).time_per_batch == pytest.approx(23 / 4)
    # With recomputation stages of two layers take 8, the last one 6.
    assert simulate_method("dtr", LAYERS, 4).time_per_batch == pytest.approx(8)
    gpipe = simulate_method(methods.get("gpipe", microbatches=8), LAYERS, 4)
    assert gpipe.time_per_batch == pytest.approx((8 + 3) * 6 / 8, rel=0.03)


@given(layers(most=12), st.integers(1, 12), st.sampled_from(["pipedream", "dtr", "petra", "fdg", "dgl", "layerpipe"]))
@settings(max_examples=60)
def test_without_messages_the_busiest_device_sets_the_pace(costs: list[LayerCost], devices: int, name: str) -> None:
    run = simulate_method(methods.get(name, microbatches=1), costs, devices)
    busiest = max(run.simulation.timeline.busy) / len(run.simulation.groups)
    assert run.time_per_batch == pytest.approx(busiest, rel=1e-9)


def test_microbatches_share_the_costs() -> None:
    whole = simulate_method(PipeDream(microbatches=1), LAYERS, 4)
    parts = simulate_method(PipeDream(microbatches=4), LAYERS, 4)
    assert parts.time_per_batch == pytest.approx(whole.time_per_batch)
    assert (whole.lateness, parts.lateness) == ((3, 2, 1, 0), (3, 2, 1, 0))


def test_memory_by_hand() -> None:
    """Two stages of four layers, 400 bytes of weights each; weight, gradient and momentum make 1200."""

    def memory(method: object, **settings: float) -> list[float]:
        run = simulate_method(method, LAYERS, 2, split=["l4"])  # type: ignore[arg-type]
        return run.device_bytes(**settings)  # type: ignore[arg-type]

    # Kept by a stage: the inputs of its layers, 3 x 80 (the data count nothing unless given) and 4 x 80. As the two
    # never wait for each other, two outputs of 80 may lie before the second stage and two gradients before the first.
    lying = 2 * 80
    assert memory(PipeDream(microbatches=1)) == [1200 + 400 + 2 * 240 + lying, 1200 + 320 + lying]
    with_data = memory(PipeDream(microbatches=1), input_bytes=10, optimizer_slots=0)
    assert with_data == [800 + 400 + 2 * 250 + lying, 800 + 320 + lying]
    # One stashed version only if a micro-batch spans an update.
    assert memory(PipeDream(microbatches=2)) == [1200 + 400 + 2 * 120 + lying / 2, 1200 + 160 + lying / 2]
    # Inputs of the stage in flight (the data), and one graph at work.
    assert memory(methods.get("dtr", microbatches=1)) == [1200 + 240 + lying, 1200 + 320 + lying]
    assert memory(DTRP(microbatches=1)) == [1200 + 400 + 240 + lying, 1200 + 320 + lying]
    # Three under way, so three may lie on the border; petra sends outputs back with their gradients, to keep no input.
    assert memory(methods.get("dsp", microbatches=1)) == [1200 + 240 + 3 * 80, 1200 + 320 + 3 * 80]
    assert memory(methods.get("petra", microbatches=1)) == [1200 + 240 + 3 * 160, 1200 + 320 + 3 * 80]
    assert memory("petra", input_bytes=1000)[0] < memory("dsp", input_bytes=1000)[0]
    # In lock-step there is never more than one message on a border.
    assert memory(methods.get("bp", microbatches=1)) == [1200 + 240 + 80, 1200 + 320 + 80]
    placed = simulate_method(LayerPipe(microbatches=1), LAYERS, 2)
    assert sum(placed.device_bytes()) > 2 * 1200


def test_a_memory_limit_moves_methods_down() -> None:
    free = plan_auto(LAYERS, 4)
    least = min(one.memory_bytes for one in free.ranking)
    tight = plan_auto(LAYERS, 4, memory_limit=least)
    assert tight.best.fits
    assert tight.best.memory_bytes == least
    over = [one for one in tight.ranking if not one.fits]
    assert over
    assert tight.ranking[-len(over) :] == tuple(over)
    assert all(one.why.startswith("needs ") for one in over)


def test_risk_comes_from_the_limit_of_all_stages() -> None:
    found = {one.method: one for one in plan_auto(LAYERS, 4, batch_size=64).ranking}
    assert found["1f1b"].risk == "exact"
    assert found["dgl"].risk == "other gradient"
    parts = found["pipedream"].plan.options["microbatches"]
    lags = [Lag(late, USUAL, parts) for late in (3, 2, 1, 0)]
    assert found["pipedream"].stability == chain_limit(lags)
    assert found["dgl"].stability is None
    # The planner's own delays per layer, not those of stages.
    run = simulate_method("layerpipe", LAYERS, 4, batch_size=64)
    worst = max(run.lateness)
    limit = chain_limit([Lag(late, USUAL, run.microbatches) for late in run.lateness])
    assert found["layerpipe"].stability == pytest.approx(limit)
    assert found["layerpipe"].staleness == worst / run.microbatches


def test_an_optimizer_without_theory_gets_no_verdict() -> None:
    plan = plan_auto(LAYERS, 4, batch_size=64, methods=["bp", "1f1b", "pipedream", "dgl"], moved_by=None)
    assert {one.method: one.risk for one in plan.ranking} == {
        "bp": "exact",
        "1f1b": "exact",
        "pipedream": "not known",
        "dgl": "other gradient",
    }
    assert {one.stability for one in plan.ranking} == {None}
    assert "no theory" in plan.ranking[-1].why
    json.dumps(plan.to_json(), allow_nan=False)


def test_risky_methods_come_after_harmless_ones() -> None:
    plan = plan_auto(mac_costs(network_shapes("resnet50"), batch=64), 16, batch_size=64, moved_by=Motion(0.9))
    risks = [one.risk for one in plan.ranking]
    first_risky = next(n for n, risk in enumerate(risks) if risk not in ("exact", "about bp"))
    assert all(risk not in ("exact", "about bp") for risk in risks[first_risky:])


def test_slow_links_favour_fewer_bytes() -> None:
    """Where messages take far longer than the work, one device alone is best, and pipelines gain nothing."""
    slow = Machine(Channel(bandwidth=0.5))
    alone = simulate_method("pipedream", LAYERS, 4, machine=slow)
    assert (alone.stages, alone.speedup) == (1, 1)
    assert simulate_method("pipedream", LAYERS, 4, split=["l2", "l4", "l6"], machine=slow).speedup < 1
    assert simulate_method("pipedream", LAYERS, 4, machine=Machine(Channel(bandwidth=1e9))).speedup > 3.8


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("name", ["pipedream", "1f1b", "petra", "dgl", "bp"])
def test_straight_methods_were_cut_without_a_look_at_the_links(name: str, overlapped: bool) -> None:
    """No cut of a small chain is faster than the one that is chosen, by more than the run in has to do with it."""
    sizes = (80, 4, 90, 70, 6, 80)
    costs = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=size) for n, size in enumerate(sizes)]
    machine = Machine(Channel(bandwidth=20, latency=0.1, overlapped=overlapped))
    method = methods.get(name, microbatches=4)
    found = simulate_method(method, costs, 3, machine=machine)
    splits = [split for count in range(3) for split in combinations([layer.name for layer in costs[1:]], count)]
    best = min(simulate_method(method, costs, 3, split=s, machine=machine).time_per_batch for s in splits)
    assert found.time_per_batch <= 1.05 * best
    straight = simulate_method(method, costs, 3, split=["l2", "l4"], machine=machine)
    assert found.time_per_batch <= straight.time_per_batch


def test_links_that_cost_next_to_nothing_change_no_cut() -> None:
    for name in ("pipedream", "dtr", "gpipe", "dgl"):
        free = simulate_method(name, LAYERS, 4)
        fast = simulate_method(name, LAYERS, 4, machine=Machine(Channel(bandwidth=1e12)))
        assert fast.starts == free.starts


def test_repeated_forwards_are_simulated_where_layers_are_no_linear_maps() -> None:
    """Four layers on six devices: tasks of a layer lie on several, which run it forward again unless it is linear."""
    method = LayerPipe(microbatches=1, mode="atomic")
    known = simulate_method(method, LAYERS[:4], 6, linear=[True] * 4)
    bent = simulate_method(method, LAYERS[:4], 6, linear=[False] * 4)
    assert known.plan is not None
    assert bent.plan is not None
    assert not known.plan.dataflow.repeated_forwards()
    again = len(bent.plan.dataflow.repeated_forwards())
    assert again > 0
    assert sum(bent.simulation.timeline.busy) == pytest.approx((11 + again) * len(bent.simulation.groups))
    assert known.time_per_batch == pytest.approx(2)
    assert bent.time_per_batch > 2


def test_speeds_and_a_given_split() -> None:
    run = simulate_method("pipedream", LAYERS, 2, split=["l2"], machine=Machine(speeds=(1, 3.6)))
    assert run.time_per_batch == pytest.approx(5)
    assert run.split == ("l2",)
    for wrong, message in ((["l9"], "no layer is called"), (["l3", "l1"], "order"), (["l1", "l2", "l3"], "only 3")):
        with pytest.raises(PlanError, match=message):
            simulate_method("pipedream", LAYERS, 3, split=wrong)


def test_more_devices_than_layers() -> None:
    plan = plan_auto(LAYERS[:2], 4, methods=["pipedream", "layerpipe"])
    found = {one.method: one for one in plan.ranking}
    assert found["pipedream"].stages == 2
    assert "only 2 of 4 devices used" in found["pipedream"].why
    assert found["layerpipe"].stages == 4
    crowd = simulate_method("layerpipe", LAYERS[:2], 1000)
    assert crowd.microbatches == simulate_method("layerpipe", LAYERS[:2], 5).microbatches
    assert (crowd.stages, crowd.time_per_batch) == (5, 1)


def test_table_and_errors() -> None:
    lines = plan_auto(LAYERS, 2, methods=["bp", "pipedream"]).table()
    assert lines[0].startswith("method")
    assert [line.split()[0] for line in lines[1:3]] == ["pipedream", "bp"]
    assert [line.endswith(ELSEWHERE) for line in lines[3:]] == [True]
    # Nothing is late, so that there is no bound to be trusted.
    assert ELSEWHERE not in "".join(plan_auto(LAYERS, 2, methods=["bp"]).table())
    with pytest.raises(PlanError, match="at least 1 device"):
        simulate_method("bp", LAYERS, 0)
    refused = plan_auto(LAYERS, 4, methods=["bp"])
    assert refused.best.method == "bp"
    assert math.isfinite(refused.best.stability)


def test_actions_updates_and_messages_were_free() -> None:
    """A network of tiny layers was promised almost twice the speed of one device, whatever it takes to share it."""
    layers = [LayerCost(f"l{n}", 1.0, 1.0, 1.0, 1000, 100) for n in range(8)]
    free = plan_auto(layers, 2)
    assert free.pays
    dear = plan_auto(layers, 2, machine=Machine(Channel(1000, 2.0, overlapped=False), action=10.0), update=1.0)
    assert not dear.pays
    assert "no method pays" in dear.table()[-1]
    assert "no method pays" not in "".join(free.table())
    assert {one.method: one.stages for one in dear.ranking}["bp"] == 1
    assert dear.to_json()["pays"] is False


@pytest.mark.parametrize("name", ["bp", "pipedream", "layerpipe"])
def test_an_update_of_all_weights_is_shared_by_their_bytes(name):
    layers = [LayerCost(f"l{n}", 1.0, 1.0, 1.0, 0, weight) for n, weight in enumerate((300, 100, 0, 100))]
    method = get(name, microbatches=1)
    without, with_update = (simulate_method(method, layers, 1, update=update) for update in (0.0, 2.0))
    assert with_update.time_per_batch == pytest.approx(without.time_per_batch + 2.0)
    assert with_update.speedup == pytest.approx(1.0)
    two = simulate_method("pipedream", layers, 2, split=["l2"], update=5.0)
    # The first two layers take 5 and have four fifths of the bytes.
    assert two.time_per_batch == pytest.approx(5 + 4)


@given(parts=st.integers(1, 16), fixed=st.floats(0, 1))
def test_the_fixed_share_of_a_layer_is_found_again_in_a_part_of_it(parts, fixed):
    layer = LayerCost("a", 2.0, 3.0, 4.0, 8, 8, fixed=fixed)
    part = layer.share(parts)
    assert part.work == pytest.approx(9 * (fixed + (1 - fixed) / parts))
    if parts > 1:
        assert replace(layer, fixed=0).with_part(part, parts).fixed == pytest.approx(fixed, abs=1e-9)
