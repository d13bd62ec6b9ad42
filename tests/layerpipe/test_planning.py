"""From a model to tasks: layers from blocks, costs, and placements that suit layers other than linear maps."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from layerpipe_jobs import MIXED, UNIT, chain_costs, residual_net, task_plan
from rank_jobs import copied_state, momentum_sgd
from recording import feed
from small_nets import tanh_net, vectors
from unlatch.config.study import load_study
from unlatch.errors import PlanError
from unlatch.methods import LayerPipe, get
from unlatch.methods.layerpipe.planning import plan_layers
from unlatch.methods.layerpipe.task_planning import charged_loads, place_tasks
from unlatch.models import build
from unlatch.nn.chain import chain
from unlatch.nn.linear_map import linear_map
from unlatch.plan.layer_costs import write_layer_costs
from unlatch.plan.layer_groups import group_blocks


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def test_linear_maps_take_the_best_placement():
    for devices, interval in ((1, 29), (2, 16), (3, 10), (4, 8), (5, Fraction(13, 2)), (6, 6)):
        plan, loads, note = place_tasks(chain_costs(MIXED), devices, "divisible", [True] * 4)
        assert plan.initiation_interval == max(loads) == interval
        assert note == ""


def test_the_simplest_of_equal_placements_is_taken():
    plan, _, _ = place_tasks(chain_costs(UNIT), 3, "divisible", [True] * 4)
    assert all(task.fraction == 1 for task in plan.tasks)
    assert plan.initiation_interval == 4


def test_a_second_forward_is_charged_and_avoided_where_it_does_not_pay():
    free, _, _ = place_tasks(chain_costs(UNIT), 3, "atomic", [True] * 4)
    assert charged_loads(free, [True] * 4) == list(free.loads)
    # G of the second layer left its home: one more forward there.
    assert sum(charged_loads(free, [False] * 4)) == sum(free.loads) + 1
    plan, loads, note = place_tasks(chain_costs(UNIT), 3, "atomic", [False] * 4)
    assert max(loads) == 5
    assert note == ""
    assert {len({t.device for t in plan.tasks if t.layer == n}) for n in range(4)} == {1}
    # Whole layers 20, G of the third elsewhere 17 for 16: worth a forward.
    plan, loads, note = place_tasks(chain_costs(MIXED), 2, "atomic", [False] * 4)
    assert (max(plan.loads), max(loads)) == (16, 17)
    assert "run forward again" in note


def test_layers_that_mix_rows_keep_their_input_gradient_whole():
    plan, _, _ = place_tasks(chain_costs((9, 1, 9)), 2, "divisible", [True, False, True])
    assert all(task.fraction == 1 for task in plan.tasks if task.layer == 1)


def test_layers_begin_where_something_is_trained():
    tied = nn.Linear(3, 3)
    blocks = chain([nn.Flatten(), tied, nn.ReLU(), nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3), nn.Tanh()])
    assert group_blocks(blocks) == [(0, 3), (3, 5), (5, 7)]
    assert group_blocks(chain([nn.Linear(3, 3), tied, nn.ReLU(), tied])) == [(0, 1), (1, 4)]
    frozen = nn.Linear(3, 3).requires_grad_(False)
    assert group_blocks(chain([nn.Linear(3, 3), frozen, nn.Linear(3, 3)])) == [(0, 2), (2, 3)]


def test_what_is_and_what_is_no_linear_map():
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    named = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(False)

    class Own(nn.Linear):
        pass

    assert linear_map([nn.Sequential(nn.Linear(2, 2)), nn.Identity(), nn.Sigmoid()]) is not None
    for modules in (
        [nn.ReLU()],
        [nn.Linear(2, 2), nn.GELU()],
        [nn.Linear(2, 2), nn.ReLU(), nn.ReLU()],
        [nn.Linear(2, 2), nn.LeakyReLU(0.0)],
        [nn.Conv2d(2, 2, 3, padding="same")],
        [nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")],
        [nn.BatchNorm1d(2)],
        [Own(2, 2)],
        [hooked],
        [named],
        [frozen],
    ):
        assert linear_map(modules) is None, modules


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_gradients_of_linear_maps_are_those_of_autograd_bit_for_bit(kind, last):
    form = torch.channels_last if last else torch.contiguous_format
    grouped = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), nn.LeakyReLU(0.1))
    for net, shape in ((grouped, (5, 4, 9, 9)), (nn.Conv2d(3, 4, 1, bias=False), (2, 3, 4, 4))):
        x = torch.randn(shape, dtype=kind).to(memory_format=form)
        check_against_autograd(net.to(kind).to(memory_format=form), x)
    check_against_autograd(nn.Sequential(nn.Linear(7, 5), nn.Tanh()).to(kind), torch.randn(3, 4, 7, dtype=kind))
    check_against_autograd(nn.Linear(7, 5, bias=False).to(kind), torch.randn(3, 7, dtype=kind))


def check_against_autograd(net, x):
    x = x.detach().requires_grad_()
    y = net(x)
    e = torch.randn_like(y)
    expected = torch.autograd.grad(y, [x, *net.parameters()], e)
    found = linear_map([net])
    with torch.no_grad():
        delta = found.derivative(e, y)
        inputs = found.input_gradient(delta, list(net.parameters()), x.shape)
        weights = found.weight_gradients(delta, x)
    for one, other in zip(expected, [inputs, *weights], strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- whole models


def test_costs_come_from_a_file_per_block_or_per_layer(tmp_path):
    blocks = chain(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    file = tmp_path / "costs.json"
    write_layer_costs(file, chain_costs((1, 2, 4)))
    by_layer = plan_layers(blocks, LayerPipe(costs=str(file)), 2)
    write_layer_costs(file, chain_costs((1, 0, 1, 1, 4)))
    by_block = plan_layers(blocks, LayerPipe(costs=str(file)), 2)
    assert by_layer.tasks == by_block.tasks
    assert by_layer.spans == by_block.spans == ((0, 4), (4, 5))
    with pytest.raises(PlanError, match="costs of 2 layers"):
        plan_layers(blocks, LayerPipe(costs=tuple(chain_costs((1, 2)))), 2)


@pytest.mark.parametrize("mode", ["divisible", "atomic", "factor"])
def test_a_sequence_of_layers_and_functions_is_measured_and_trained(mode):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 5))
    x, y = torch.randn(64, 8, 8), torch.randint(5, (64,))
    run = unlatch.parallelize(
        net, LayerPipe(mode=mode), stages=2, loss_fn=cross_entropy, optimizer=plain_sgd, sample=(x, y)
    )
    assert run.plan.measured
    losses = [r.loss for r in feed(run, [(x, y)] * 40)]
    assert len(losses) == 40
    assert losses[-1] < 0.9 * losses[0]


def test_a_residual_network_is_trained():
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    run = unlatch.parallelize(
        build("resnet20"), "layerpipe", stages=2, loss_fn=cross_entropy, optimizer=plain_sgd, sample=(x, y)
    )
    assert len(feed(run, [(x, y)] * 3)) == 3


def test_without_a_sample_the_plan_says_that_it_guesses():
    run = unlatch.parallelize(tanh_net(4), "layerpipe", stages=2, loss_fn=mse_loss, optimizer=plain_sgd)
    assert any("guessed" in note for note in run.notes)


# ----------------------------------------------------------------- checkpoints


def test_checkpoints_go_to_any_method_and_resume_exactly(tmp_path):
    def start(method, **options):
        settings = {"loss_fn": mse_loss, "optimizer": momentum_sgd, **options}
        return unlatch.parallelize(tanh_net(4, seed=len(options)), method, **settings)

    data = vectors(9, size=8)
    tasks = {"stages": 6, "plan": task_plan(UNIT, 6, "atomic")}
    one = start(LayerPipe(mode="atomic", microbatches=1), **tasks)
    feed(one, data)
    one.save(tmp_path / "there")
    resumed = start(LayerPipe(mode="atomic", microbatches=1), **tasks)
    resumed.load(tmp_path / "there")
    plain = start("bp", stages=2, split=["1"])
    plain.load(tmp_path / "there")
    saved = copy.deepcopy(copied_state(one.module()))
    assert all(torch.equal(t, saved[name]) for name, t in plain.module().state_dict().items())
    for run in (one, resumed):
        feed(run, data)
    states = copied_state(one.module()), copied_state(resumed.module())
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())
    assert not all(torch.equal(t, saved[name]) for name, t in states[0].items())


def test_learning_rates_fall_with_the_processor():
    model, data = tanh_net(4), vectors(1, size=8)
    before = copied_state(model)
    method = LayerPipe(mode="atomic", gamma=0.5, microbatches=1)
    plan = task_plan(UNIT, 4, "atomic")
    run = unlatch.parallelize(model, method, stages=4, loss_fn=mse_loss, optimizer=plain_sgd, plan=plan)
    feed(run, data)
    truth = tanh_net(4)
    mse_loss(truth(data[0][0]), data[0][1]).backward()
    for name, p in truth.named_parameters():
        home = plan.layer_devices[int(name.split(".")[0])]
        expected = before[name] - 0.05 * 0.5 ** (3 - home) * p.grad
        torch.testing.assert_close(model.get_parameter(name).detach(), expected, rtol=0, atol=1e-15)


def test_failures_name_their_layer():
    model = residual_net(4)
    plan = task_plan(UNIT, 3, "atomic")
    method = LayerPipe(mode="atomic", microbatches=1)
    run = unlatch.parallelize(model, method, stages=3, loss_fn=mse_loss, optimizer=plain_sgd, plan=plan)
    x, y = vectors(1)[0]
    with pytest.raises(unlatch.errors.StageFailed, match="stage 0 failed in the forward of batch 0"):
        run.step(x[:, :3], y)


def test_batches_that_change_while_under_way_are_refused():
    plan = task_plan(UNIT, 6, "atomic")
    method = LayerPipe(mode="atomic", microbatches=1)
    run = unlatch.parallelize(tanh_net(4), method, stages=6, loss_fn=mse_loss, optimizer=plain_sgd, plan=plan)
    x, y = vectors(1)[0]

    def reuse_memory():
        for _ in range(9):
            run.step(x, y)
            x.add_(1.0)

    with pytest.raises(unlatch.errors.StageFailed, match="changed in place"):
        reuse_memory()


def test_the_studies_of_tasks_share_input_gradients_of_plain_convolutions():
    study = load_study(Path(__file__).parents[2] / "studies" / "digits-layerpipe.toml")
    cases = [case for case in study.cases if "tasks" in case.label and "stash" in case.label]
    shared = {}
    for case in cases:
        method, precision = get(case.config.method.name, **case.config.method.options), case.config.run.precision
        blocks = chain(build(case.config.model.name, in_channels=1))
        plan = plan_layers(blocks, method, case.config.run.stages, precision=precision)
        shared[precision] = [task.layer for task in plan.tasks if task.kind == "D" and task.fraction < 1]
        assert max(plan.delays) == 6
    assert shared["fp32"]
    assert not shared["bf16"]
