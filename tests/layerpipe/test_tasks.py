"""Tasks on devices follow the reference recursion with the planner's delays, wherever each gradient is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from layerpipe_jobs import MIXED, UNIT, chain_costs, residual_net, tall_conv_net, task_plan
from recording import Optimizers, Scripted, feed
from recursions import behind, follow_recursion, torch_sgd
from small_nets import images, tanh_net, vectors
from tied_nets import TiedLM, padded, token_mean, token_sum, tokens
from unlatch.errors import ConfigError, PlanError
from unlatch.methods import LayerPipe
from unlatch.plan import Plan, plan_from_json, plan_to_json
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.reference import SGD

# By rows a matrix product may be summed up in another order. In these sizes that is all.
ROUNDING = 1e-13
MOMENTUM = SGD(0.05, momentum=0.9)


def compare(model, plan, data, *, sgd=MOMENTUM, tolerance=0.0, loss_fn=mse_loss, **options):
    """Train, and compare every weight and loss with the recursion of the plan's delays."""
    method = LayerPipe(mode=plan.options["mode"], **{"microbatches": 1, **options})
    version = behind(plan.delays, method.microbatches * method.accumulate)
    exact = {"backward": "forward", "mixed": False, "tolerance": tolerance, "loss_fn": loss_fn}
    return follow_recursion(model, method, data, sgd, version=version, plan=plan, **exact)


# Section 5.2 of the hand-worked tables: devices -> delays per layer.
UNIT_DELAYS = {2: (2, 2, 0, 0), 3: (4, 3, 2, 0), 4: (6, 4, 2, 0), 6: (6, 3, 2, 1)}


@pytest.mark.parametrize("mode", ["divisible", "atomic", "factor"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("times", [UNIT, MIXED], ids=["U4", "H4"])
def test_linear_layers_follow_the_recursion(times, devices, mode):
    plan = task_plan(times, devices, mode)
    planned = plan_layerpipe(chain_costs(times, mode), devices, mode).delays.gradient
    if times == UNIT and devices > 1 and mode != "factor":
        assert planned == UNIT_DELAYS[devices]
    split = any(task.fraction != 1 for task in plan.tasks)
    run = compare(tanh_net(4), plan, vectors(30, size=8), tolerance=ROUNDING if split else 0.0)
    for stage in run.statistics():
        assert stage.staleness == stage.predicted_staleness
    # Merged layers share a delay, so per layer nothing else is trained than was planned.
    expanded = [plan.delays[next(n for n, (a, b) in enumerate(plan.spans) if a <= k < b)] for k in range(4)]
    assert tuple(expanded) == planned


@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("mode", ["atomic", "factor"])
def test_other_layers_are_rebuilt_elsewhere_and_follow_the_recursion_exactly(devices, mode):
    compare(residual_net(4), task_plan(UNIT, devices, mode), vectors(14, size=8))


@pytest.mark.parametrize("loss_fn", [token_mean, token_sum], ids=["mean", "counted"])
@pytest.mark.parametrize("devices", [2, 3, 4, 6])
@pytest.mark.parametrize("mode", ["atomic", "factor"])
def test_a_tied_weight_follows_the_recursion_wherever_its_gradients_are_computed(devices, mode, loss_fn):
    torch.manual_seed(0)
    data = padded(12) if loss_fn is token_sum else tokens(12)
    compare(TiedLM().double(), task_plan(UNIT, devices, mode), data, loss_fn=loss_fn, tolerance=ROUNDING)


def test_shared_input_gradients_of_large_layers_differ_by_rounding_only():
    plan = task_plan(UNIT, 4, "divisible")
    assert sum(task.fraction != 1 for task in plan.tasks) == 6
    compare(tanh_net(4, width=96), plan, vectors(12, size=33, width=96), tolerance=1e-12)


def test_convolutions_follow_the_recursion():
    model = tall_conv_net().double()
    data = [(x.double(), y) for x, y in images([6] * 10)]
    cross_entropy = nn.functional.cross_entropy
    for devices, mode in ((4, "atomic"), (6, "atomic"), (2, "divisible")):
        compare(copy.deepcopy(model), task_plan(UNIT, devices, mode), data, loss_fn=cross_entropy, tolerance=ROUNDING)


@pytest.mark.parametrize("g", [1, 3])
@pytest.mark.parametrize("net", [tanh_net, residual_net])
def test_late_weight_gradients_add_to_every_delay(net, g):
    plan, later = task_plan(MIXED, 3, "atomic"), task_plan(MIXED, 3, "atomic", extra_delay=g)
    # Weight gradients may come late, but not the merging of layers that depends on places alone.
    assert later.delays == tuple(delay + g for delay in plan.delays)
    compare(net(4), later, vectors(16, size=8), extra_delay=g)


@settings(max_examples=25)
@given(
    times=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    devices=st.integers(1, 6),
    mode=st.sampled_from(["divisible", "atomic", "factor"]),
    m=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    g=st.integers(0, 2),
    data=st.data(),
)
def test_any_chain_on_any_number_of_devices(times, devices, mode, m, accumulate, g, data):
    try:
        plan = task_plan(times, devices, mode, g)
    except PlanError:  # more devices than this chain has work for
        return
    sizes = data.draw(st.lists(st.integers(m, 9), min_size=2, max_size=8))
    batches = [vectors(1, size, seed=n)[0] for n, size in enumerate(sizes * accumulate)]
    sgd = SGD(0.03, momentum=0.9, nesterov=True)
    # Parts of a batch are weighted by their size; the recursion knows only even ones.
    batches = [(x[: len(x) // m * m], y[: len(y) // m * m]) for x, y in batches]
    options = {"microbatches": m, "accumulate": accumulate, "extra_delay": g}
    compare(tanh_net(len(times)), plan, batches, sgd=sgd, tolerance=ROUNDING, **options)


# ------------------------------------------------------------------ weights


def scripted_gradients(net, weights, devices, mode):
    optimizers = Optimizers(Scripted)
    plan = task_plan(UNIT, devices, mode)
    method = LayerPipe(mode=mode, weights=weights, microbatches=1)
    run = unlatch.parallelize(net(4), method, stages=devices, loss_fn=mse_loss, optimizer=optimizers, plan=plan)
    feed(run, vectors(14, size=8))
    return [torch.cat([t.flatten() for t in update]) for made in optimizers.made for update in made.gradients]


@pytest.mark.parametrize(
    ("net", "devices", "mode"), [(tanh_net, 4, "divisible"), (tanh_net, 6, "atomic"), (residual_net, 6, "atomic")]
)
def test_average_is_exact_for_constant_updates_here_and_elsewhere(net, devices, mode):
    stash = scripted_gradients(net, "stash", devices, mode)
    average = scripted_gradients(net, "average", devices, mode)
    latest = scripted_gradients(net, "latest", devices, mode)
    for one, other in zip(stash, average, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    assert max((a - b).abs().max().item() for a, b in zip(stash, latest, strict=True)) > 1e-4


@pytest.mark.parametrize("weights", ["stash", "latest", "average"])
@pytest.mark.parametrize("net", [tanh_net, residual_net])
def test_without_motion_all_weight_rules_give_the_gradient_of_backpropagation(net, weights):
    for devices, mode in ((4, "atomic"), (6, "factor")):
        model, data = net(4), vectors(12, size=8)
        truth = copy.deepcopy(model)
        plan = task_plan(UNIT, devices, mode)
        compare(model, plan, data, sgd=SGD(0.0), weights=weights)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), truth.parameters(), strict=True))


@pytest.mark.parametrize("weights", ["stash", "average", "latest"])
@pytest.mark.parametrize(
    ("net", "devices", "mode"),
    [("tanh", 2, "divisible"), ("tanh", 4, "divisible"), ("conv", 2, "divisible"), ("conv", 4, "atomic")],
)
def test_weights_of_input_gradients_follow_the_recursion_wherever_they_are_used(net, devices, mode, weights):
    """Here every weight gradient comes no earlier than the input gradient, so that both meet the same version."""
    plan = task_plan(UNIT, devices, mode)
    assert any(task.fraction != 1 for task in plan.tasks) == (mode == "divisible")
    if net == "conv":
        model, loss_fn = tall_conv_net().double(), nn.functional.cross_entropy
        data = [(x.double(), y) for x, y in images([6] * 16)]
    else:
        model, loss_fn, data = tanh_net(4), mse_loss, vectors(24, size=8)
    follow_recursion(
        model,
        LayerPipe(mode=mode, weights=weights, microbatches=1),
        data,
        MOMENTUM,
        version=behind(plan.delays),
        plan=plan,
        loss_fn=loss_fn,
        backward={"stash": "forward", "average": "average", "latest": "current"}[weights],
        mixed=weights != "stash",
        delays=plan.delays,
        tolerance=ROUNDING,
    )


def test_under_bf16_tasks_are_placed_whole_and_a_shared_one_is_refused_by_that_name():
    """Once the message was about linear maps, which the layer in question was."""
    options = {"loss_fn": nn.functional.cross_entropy, "optimizer": torch_sgd(SGD(0.05)), "precision": "bf16"}
    with pytest.raises(PlanError, match=r"layer 1 \(2\) is shared by rows, which precision='bf16' does not allow"):
        unlatch.parallelize(tall_conv_net(), LayerPipe(), stages=2, plan=task_plan(UNIT, 2, "divisible"), **options)
    for weights in ("stash", "average", "latest"):
        method = LayerPipe(weights=weights, microbatches=1)
        run = unlatch.parallelize(tall_conv_net(), method, stages=2, sample=images([6])[0], **options)
        exact = unlatch.parallelize(
            tall_conv_net(), method, stages=2, plan=run.plan, **(options | {"precision": "fp32"})
        )
        found, expected = ([result.loss for result in feed(each, images([6] * 8))] for each in (run, exact))
        assert found != expected
        assert found == pytest.approx(expected, rel=0.02)


def test_old_weights_are_copied_only_where_they_are_needed():
    """The first layer has no input gradient, so nobody needs its old weights."""
    plan = task_plan(UNIT, 6, "atomic")
    run = compare(tanh_net(4), plan, vectors(20, size=8))
    copies = {s.stage: s.weight_copies for s in run.statistics()}
    assert copies[0] == 0
    assert max(copies.values()) >= 2


# --------------------------------------------------------------------- plans


def test_a_plan_survives_the_trip_through_text():
    plan = task_plan(MIXED, 3, "divisible")
    assert plan_from_json(plan_to_json(plan)) == plan
    assert "delay" in str(plan)


def test_bad_plans_are_refused_before_training():
    options = {"loss_fn": mse_loss, "optimizer": torch_sgd(SGD(0.1))}
    with pytest.raises(PlanError, match="shared by rows"):
        unlatch.parallelize(residual_net(4), LayerPipe(), stages=4, plan=task_plan(UNIT, 4, "divisible"), **options)
    plain = Plan(("0", "1", "2", "3"), (0, 2), (1.0, 1.0), (1, 1))
    with pytest.raises(PlanError, match="plan of tasks"):
        unlatch.parallelize(tanh_net(4), LayerPipe(), stages=2, plan=plain, **options)
    with pytest.raises(PlanError, match="would be idle"):
        task_plan(UNIT, 12, "atomic")
    with pytest.raises(ConfigError, match="shrink"):
        LayerPipe(mode="atomic", shrink=0.9)
