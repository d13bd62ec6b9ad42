"""Oracles about gradients (O1-O4, O6, O9, O12, O13): all stages together compute the gradient of one function."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch
from border_cases import SPLIT, STAGES, Bench, Fixed, batch, random_like, residual_net, stages_of_net, truth
from recording import Optimizers, RecordingSGD, stages_of
from unlatch.methods import AuxNet
from unlatch.methods.auxnet.mismatch import BorderRule
from unlatch.methods.auxnet.probe import serial_gradients
from unlatch.methods.auxnet.sources import Raw
from unlatch.transport.mail import Micro

BETAS = [1e-3, 1.0, 1e3]


def lagrangian(net: nn.Sequential, lam: list[Tensor], kappa: list[Tensor], beta: float) -> Tensor:
    """The global function, written out: psi is a mean over the batch, multipliers carry that 1/B themselves."""
    x, y = batch()
    stages = stages_of_net(net)
    arriving = [stage(h) for stage, h in zip(stages, [x, *lam], strict=True)]
    total = cross_entropy(arriving[-1], y)
    for state, value, multiplier in zip(arriving, lam, kappa, strict=False):
        total = total + beta * (value - state).square().sum() / (2 * len(x)) - (multiplier * (value - state)).sum()
    return total


def central_difference(function, tensor: Tensor, index: int, step: float = 1e-5) -> float:
    flat = tensor.data.view(-1)
    value = flat[index].item()
    sides = []
    for sign in (1, -1):
        flat[index] = value + sign * step
        sides.append(float(function()))
    flat[index] = value
    return (sides[0] - sides[1]) / (2 * step)


@torch.no_grad()
def agrees(function, tensor: Tensor, gradient: Tensor, entries: int = 4) -> None:
    for index in torch.linspace(0, tensor.numel() - 1, entries).long().tolist():
        assert central_difference(function, tensor, index) == pytest.approx(gradient.view(-1)[index].item(), abs=1e-8)


def test_o1_serial_gradient_is_the_central_difference():
    net, (x, y) = residual_net(), batch()
    run = unlatch.parallelize(
        net, "bp", stages=STAGES, loss_fn=cross_entropy, optimizer=Optimizers(RecordingSGD, lr=0.0), split=SPLIT
    )
    micro = Micro(0, 0, 0, 1, len(x), 1.0, 0, True)
    found = serial_gradients(stages_of(run), micro, Raw(x, y))
    for stage, gradients in zip(stages_of(run), found, strict=True):
        for p, gradient in zip(stage.params, gradients, strict=True):
            agrees(lambda: cross_entropy(net(x), y), p, gradient)


def test_o2_local_gradients_are_those_of_the_global_lagrangian():
    net, (x, y) = residual_net(), batch()
    states, _, _ = truth(net, x, y)
    lam, kappa, beta = random_like(states, 5), random_like(states, 6, 0.1), 0.7
    bench = Bench(net, lam, kappa, beta=beta)

    def whole() -> Tensor:
        return lagrangian(net, lam, kappa, beta)

    for stage, gradients in zip(stages_of_net(net), bench.weight_gradients(), strict=True):
        for p, gradient in zip(stage.parameters(), gradients, strict=True):
            agrees(whole, p, gradient)
    for value, gradient in zip(lam, bench.input_gradients(), strict=True):
        agrees(whole, value, gradient)


@pytest.mark.parametrize("beta", BETAS)
def test_o3_true_states_and_adjoints_give_backpropagation_for_any_beta(beta):
    net = residual_net()
    states, adjoints, gradients = truth(net, *batch())
    bench = Bench(net, states, adjoints, beta=beta)
    for found, expected in zip(bench.weight_gradients(), gradients, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-16)
    for found in bench.input_gradients():
        assert found.abs().max() < 1e-16


def test_o3_holds_without_any_penalty():
    """beta = 0 is no setting of its own, but weights of zero are: then multipliers alone carry the gradient."""
    net = residual_net()
    states, adjoints, gradients = truth(net, *batch())
    bench = Bench(net, states, adjoints, pull=0.0, imitate=0.0)
    for found, expected in zip(bench.weight_gradients(), gradients, strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-16)


@pytest.mark.parametrize("beta", BETAS)
def test_o4_penalty_at_the_true_states_moves_only_the_last_stage_and_input(beta):
    net = residual_net()
    states, adjoints, gradients = truth(net, *batch())
    bench = Bench(net, states, beta=beta)
    found = bench.weight_gradients()
    assert all(torch.equal(a, b) for a, b in zip(found[-1], gradients[-1], strict=True))
    assert all(not g.any() for stage in found[:-1] for g in stage)
    inputs = bench.input_gradients()
    assert torch.equal(inputs[-1], adjoints[-1])
    assert all(not g.any() for g in inputs[:-1])


def test_o6_the_lagrangian_is_a_penalty_with_a_shifted_target():
    rule, beta = BorderRule("sum", normalise=False), 0.3
    x, lam, kappa = random_like([torch.zeros(5, 6, dtype=torch.float64)] * 3)
    target = lam - kappa / (beta * rule.stiffness(lam))
    direct = beta * rule.psi(lam, x) - (kappa * (lam - x)).sum()
    shifted = beta * rule.psi(x, target) - kappa.square().sum() * len(x) / (2 * beta)
    assert float(direct) == pytest.approx(float(shifted), abs=1e-12)
    seed = kappa + beta * rule.gradient(x, lam)
    torch.testing.assert_close(beta * rule.gradient(x, target), seed, rtol=0, atol=1e-15)


class Shallow(nn.Module):
    """An AuxNet with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def auxnets() -> list[Shallow]:
    torch.manual_seed(9)
    return [Shallow().double() for _ in range(STAGES - 1)]


def train(nets: list[Shallow], steps: int, **options) -> tuple[nn.Sequential, Optimizers]:
    net, (x, y), aux = residual_net(), batch(), Optimizers(RecordingSGD, lr=0.05)
    method = AuxNet(
        factory=lambda border: nets[border.stage - 1],
        aux_optimizer=aux,
        **{"pull": 0.6, "imitate": 0.6, "units": "sum", "border_norm": False, **options},
    )
    run = unlatch.parallelize(
        net,
        method,
        stages=STAGES,
        loss_fn=cross_entropy,
        optimizer=Optimizers(RecordingSGD, lr=0.05),
        split=SPLIT,
        sample=(x, y),
    )
    for _ in range(steps):
        run.step(x, y)
    return net, aux


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("theta", [0.25, 1.0])
def test_o9_explicit_correction_and_chain_rule_take_the_same_sgd_step(norm, theta):
    one, other = auxnets(), auxnets()
    net_a, _ = train(one, 3, correction="chain-rule", border_norm=norm)
    net_b, _ = train(other, 3, correction="explicit", theta=theta, border_norm=norm)
    pairs = [*zip(net_a.parameters(), net_b.parameters(), strict=True)]
    pairs += [
        (a, b) for m, n in zip(one, other, strict=True) for a, b in zip(m.parameters(), n.parameters(), strict=True)
    ]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    assert not torch.equal(one[0].layer.weight, auxnets()[0].layer.weight)


def test_o9_both_are_the_gradient_of_one_loss_per_rank():
    """The non-intrusive form: plain autograd on a loss with two terms, the prediction attached."""
    nets, net, (x, y) = auxnets(), residual_net(), batch()
    beta = 0.6
    stages = stages_of_net(net)
    lam = [a(x) for a in nets]
    inputs = [x, *lam]
    arriving = [stage(h.detach()) for stage, h in zip(stages, inputs, strict=True)]
    for k in range(1, STAGES):
        out = stages[k](lam[k - 1])
        local = cross_entropy(out, y) if k == STAGES - 1 else beta * _psi(out, lam[k].detach())
        loss = local + beta * _psi(lam[k - 1], arriving[k - 1].detach())
        expected = torch.autograd.grad(loss, list(nets[k - 1].parameters()), retain_graph=True)
        _, aux = train(auxnets(), 1)
        for a, b in zip(aux[k - 1].gradients[0], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-15)


def _psi(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum() / (2 * len(a))


def test_o9_several_fits_break_the_identity():
    one, other = auxnets(), auxnets()
    train(one, 1, correction="explicit")
    train(other, 1, correction="explicit", aux_steps=3)
    assert not torch.allclose(one[2].layer.weight, other[2].layer.weight, atol=1e-6)


@pytest.mark.parametrize("changed", [1, 2, 3])
def test_o12_weights_above_do_not_touch_the_gradient_of_a_stage(changed):
    plain, perturbed = residual_net(), residual_net()
    states, _, _ = truth(plain, *batch())
    lam = random_like(states)
    with torch.no_grad():
        for p in stages_of_net(perturbed)[changed].parameters():
            p.add_(0.1)
    one, other = Bench(plain, lam).weight_gradients(), Bench(perturbed, lam).weight_gradients()
    for k in range(STAGES):
        same = all(torch.equal(a, b) for a, b in zip(one[k], other[k], strict=True))
        assert same == (k != changed), k


def test_o12_no_gradient_reaches_a_network_of_another_stage():
    net, nets, (x, y) = residual_net(), auxnets(), batch()
    run = unlatch.parallelize(
        net,
        AuxNet(factory=lambda border: nets[border.stage - 1], aux_optimizer=Optimizers(RecordingSGD, lr=0.0)),
        stages=STAGES,
        loss_fn=cross_entropy,
        optimizer=Optimizers(RecordingSGD, lr=0.0),
        split=SPLIT,
        sample=(x, y),
    )
    stations, micro = run.stations, Micro(0, 0, 0, 1, len(x), 1.0, 0, True)
    stations[0].enter(micro, (x, y))
    for k in (1, 2, 3):
        stations[k].enter(micro, ((x, y), None))
    told = {k: stations[k].predict(micro)[0] for k in (1, 2, 3)}
    for station in stations.values():
        station.forward(micro)
    stations[3].backward(micro)
    stations[1].seed(micro, told[2])
    stations[1].backward(micro)
    touched = [any(p.grad is not None for p in s.parameters()) for s in stages_of_net(net)]
    assert touched == [False, True, False, True]
    assert all(p.grad is None for n in nets for p in n.parameters())


class Oracle(nn.Module):
    """The true input of a stage, from the stages before it; holds none of their weights."""

    def __init__(self, before: list[nn.Module]) -> None:
        super().__init__()
        self._before = (before,)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        for stage in self._before[0]:
            x = stage(x)
        return x


@pytest.mark.parametrize("beta", [0.01, 10.0])
def test_o13_with_true_predictions_and_multipliers_training_is_that_of_backpropagation(beta):
    net, reference = residual_net(), residual_net()
    stages = stages_of_net(net)
    data = [batch(seed) for seed in range(8)]
    method = AuxNet(
        form="lagrangian",
        multiplier=lambda border, x, y: truth(net, x, y)[1][border - 1],
        factory=lambda border: Oracle(stages[: border.stage]),
        beta=beta,
        units="sum",
        border_norm=False,
    )

    def losses(model: nn.Module, chosen) -> list[float | None]:
        run = unlatch.parallelize(
            model,
            chosen,
            stages=STAGES,
            loss_fn=cross_entropy,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            split=SPLIT,
            sample=data[0],
        )
        return [run.step(x, y).loss for x, y in data]

    assert losses(net, method) == pytest.approx(losses(reference, "bp"), rel=1e-12)
    for a, b in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_the_oracles_can_fail():
    """A multiplier that is off by a little is seen by O3."""
    net = residual_net()
    states, adjoints, gradients = truth(net, *batch())
    wrong = copy.deepcopy(adjoints)
    wrong[1] = wrong[1] * 1.001
    found = Bench(net, states, wrong).weight_gradients()
    assert (found[1][0] - gradients[1][0]).abs().max() > 1e-8
    assert Fixed(states[0])(batch()[0]).shape == states[0].shape
