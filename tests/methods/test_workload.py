"""What methods say they cost: times by hand, and messages as an inline run sends them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from recording import feed, listening
from unlatch import methods
from unlatch.advise.prediction import simulate_method
from unlatch.methods import DGL, DNI, PETRA, AugLocal, AuxNet, AuxVar, LayerPipe
from unlatch.nn.tree import tree_bytes
from unlatch.plan.layer_costs import LayerCost
from unlatch.schedule import Kind, simulate, streams
from unlatch.schedule.entries import OUTSIDE, Entry

#: F, D, G of 1, 2 and 3, six layers in stages of two.
LAYERS = [LayerCost(f"l{n}", 1, 2 if n else 0, 3, activation_bytes=10 * (n + 1)) for n in range(6)]
STARTS = (0, 2, 4)


def times(method: methods.Method, stage: int) -> dict[str, float]:
    """Everything that a stage spends time on, per micro-batch."""
    work = method.workload(LAYERS, STARTS)
    entries = [entry for entry in method.schedule(3).entries if entry.station == stage]
    return {str(entry.kind): work.time(entry) for entry in entries if work.time(entry)}


def test_chains_run_forward_again_where_their_rule_says_so():
    assert times(methods.get("pipedream"), 1) == {"F": 2, "B": 10}
    assert times(methods.get("dtr"), 1) == {"F": 2, "B": 12}
    assert times(methods.get("dtr"), 2) == {"F": 2, "B": 10}
    assert times(methods.get("zb-h1"), 1) == {"F": 2, "I": 4, "W": 6}


def test_outputs_come_back_to_stages_that_reverse():
    work = PETRA().workload(LAYERS, STARTS)
    assert (work.bytes(("forward", 0, 1)), work.bytes(("backward", 1, 0))) == (20, 40)
    stored = PETRA(store=(0,)).workload(LAYERS, STARTS)
    assert (stored.bytes(("backward", 1, 0)), stored.bytes(("backward", 2, 1))) == (20, 80)


def test_heads_and_synthesisers_are_estimated_from_similar_layers():
    # A head as the last layer, forward and back; a synthesiser as three layers like the one below it.
    assert times(DGL(), 1) == {"F": 2, "A": 6, "B": 10}
    # Layers change shape here, so that AugLocal takes all that come later.
    assert times(AugLocal(), 0)["A"] == 4 * 6
    assert times(DNI(), 1) == {"L": 18, "F": 2, "A": 3, "B": 10}
    assert times(DNI(), 2) == {"F": 2, "B": 10}


def test_auxnets_are_estimated_from_the_layers_that_they_copy():
    flat = [LayerCost(f"l{n}", 1, 2 if n else 0, 3, activation_bytes=10) for n in range(6)]
    work = AuxNet().workload(flat, STARTS)
    # The first layer and one of the run below: forward 2; backward 3 + 5.
    assert [work.time(Entry(Kind(kind), 2)) for kind in "PFBC"] == [2, 2, 10, 8]
    deep = AuxNet(depth=2).workload(flat, STARTS)
    assert [deep.time(Entry(Kind(kind), 2)) for kind in "PFBC"] == [3, 2, 10, 13]
    replayed = AuxNet(form="lagrangian").workload(flat, STARTS)
    assert replayed.time(Entry(Kind("C"), 2)) == 8 + 2
    fitted = AuxNet(correction="explicit", aux_steps=3).workload(flat, STARTS)
    assert fitted.time(Entry(Kind("C"), 2)) == 3 * 8 + 2 * 2
    assert times(AuxVar(), 1) == {"N": 2, "F": 2, "B": 10}


@pytest.mark.parametrize("method", [DGL(), DNI(), AuxNet(), AuxVar(), AuxNet(form="lagrangian"), methods.get("sph")])
def test_the_dearest_stage_sets_the_pace_where_nobody_waits_long(method):
    run = simulate_method(method, LAYERS, 3, split=["l2", "l4"])
    busiest = max(run.simulation.timeline.busy) / len(run.simulation.groups)
    assert run.time_per_batch >= busiest * (1 - 1e-9)
    assert run.simulation.staleness == (0, 0, 0)
    if method.name in ("dgl", "dni"):
        assert run.time_per_batch == pytest.approx(busiest)


def test_serial_batches_are_simulated_as_they_are_trained():
    """Every second batch by plain backpropagation: 6 + 6 + 6 units of forward and backward, one stage at a time."""
    parallel = simulate_method(AuxVar(), LAYERS, 3, split=["l2", "l4"]).time_per_batch
    serial = simulate_method(AuxVar(serial_from=0), LAYERS, 3, split=["l2", "l4"]).time_per_batch
    mixed = simulate_method(AuxVar(serial_every=2), LAYERS, 3, split=["l2", "l4"]).time_per_batch
    assert parallel == 12
    assert serial == 34
    assert parallel < mixed < serial


VARIANTS = {
    **{name: methods.get(name) for name in methods.names() if not isinstance(methods.get(name), LayerPipe)},
    # Nothing here can be computed back.
    "petra": methods.get("petra", store=(0, 1)),
    "auxnet, replay": AuxNet(form="lagrangian"),
    "auxnet, synthesiser": AuxNet(form="lagrangian", multiplier="synthesiser"),
    "auxnet, rebuild": AuxNet(form="lagrangian", multiplier="rebuild"),
    "auxnet, serial": AuxNet(serial_every=2),
    "auxvar, lagrangian": AuxVar(form="lagrangian"),
    # Only pictures are sampled down.
    "sph": methods.get("sph", downsample=1),
    "layerpipe, stages": LayerPipe(mode="stages", extra_delay=1),
}
#: Messages whose payload is nothing but a tensor of the border's size, or several.
PURE = ("state", "input", "adjoint", "multiplier", "introduced")


@pytest.mark.parametrize("name", VARIANTS)
def test_messages_are_those_of_an_inline_run(name):
    method, widths, batches = VARIANTS[name].resolve(3, 8), (6, 5, 4, 7), 6
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)])
    data = [(torch.randn(8, widths[0]), torch.randint(0, widths[-1], (8,))) for _ in range(batches)]
    with listening() as messages:
        run = unlatch.parallelize(
            model,
            method,
            stages=3,
            split=["1", "2"],
            loss_fn=cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            sample=data[0],
        )
        messages.clear()
        feed(run, data)
    parts = method.per_batch
    costs = [LayerCost(str(n), 1, 1, 1, activation_bytes=4 * 8 // parts * width) for n, width in enumerate(widths[1:])]
    work = method.workload(costs, range(3))
    followed = streams(run.schedule, [parts] * batches, method.accumulate, fresh=lambda batch: True)
    simulated = simulate(followed, work).sent
    senders = {(what, receiver): sender for e in run.schedule.entries for what, sender, receiver in e.incoming}
    assert OUTSIDE not in senders.values()
    routes = [(m.kind, senders[m.kind, m.stage], m.stage) for m in messages]
    assert Counter(routes) == {route: sent.messages for route, sent in simulated.items() if sent.messages}
    for route, message in zip(routes, messages, strict=True):
        if route[0] in PURE:
            assert tree_bytes(message.payload) == work.bytes(route), route
