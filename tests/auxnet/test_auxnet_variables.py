"""Oracles about repeated corrections at fixed weights (O5, O7, O8, O10) on `auxnet` itself.

Each AuxNet is its auxiliary variable: a network whose output is its parameter. One SGD step of size theta B / beta is
then one correction with step theta, however the correction is made.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import unlatch
from border_cases import BATCH, SPLIT, STAGES, Fixed, batch, random_like, residual_net, stages_of_net, truth
from recording import Optimizers, RecordingSGD
from unlatch.methods import AuxNet


class Sweeps:
    """Weights stand still; every step is one simultaneous correction of all auxiliary variables."""

    def __init__(self, start: list[Tensor] | None = None, *, beta: float = 1.0, theta: float = 1.0, **options) -> None:
        self.net, self.data = residual_net(), batch()
        self.states, self.adjoints, self.gradients = truth(self.net, *self.data)
        self.variables = [Fixed(value) for value in (self.states if start is None else start)]
        self.optimizers = Optimizers(RecordingSGD, lr=0.0)
        method = AuxNet(
            factory=lambda border: self.variables[border.stage - 1],
            aux_optimizer=Optimizers(torch.optim.SGD, lr=theta * BATCH / beta),
            beta=beta,
            theta=theta,
            **{"pull": 1.0, "imitate": 1.0, "units": "sum", "border_norm": False, **options},
        )
        self.run = unlatch.parallelize(
            self.net,
            method,
            stages=STAGES,
            loss_fn=cross_entropy,
            optimizer=self.optimizers,
            split=SPLIT,
            sample=self.data,
        )

    def step(self) -> float | None:
        """One sweep; the largest error of any stage's gradient to backpropagation's, once all stages have one."""
        self.run.step(*self.data)
        if not all(optimizer.gradients for optimizer in self.optimizers.made):
            return None
        errors = []
        for optimizer, expected in zip(self.optimizers.made, self.gradients, strict=True):
            found = torch.cat([g.flatten() for g in optimizer.gradients[-1]])
            true = torch.cat([g.flatten() for g in expected])
            errors.append(float((found - true).norm() / true.norm()))
        return max(errors)

    @property
    def lam(self) -> list[Tensor]:
        return [variable.value.detach().clone() for variable in self.variables]

    @torch.no_grad()
    def arriving(self) -> list[Tensor]:
        """What the stages below hand up, from their own auxiliary variables."""
        stages = stages_of_net(self.net)[:-1]
        return [stage(h) for stage, h in zip(stages, [self.data[0], *self.lam], strict=False)]

    def violation(self) -> float:
        return max(float((a - b).norm()) for a, b in zip(self.lam, self.arriving(), strict=True))

    def local_adjoints(self, kappa: list[Tensor], beta: float) -> list[Tensor]:
        """p_k, written out: the gradient of each stage's own loss with respect to its auxiliary variable."""
        found = []
        targets = [*zip(self.lam, kappa, strict=True)][1:]
        for k, (stage, h) in enumerate(zip(stages_of_net(self.net)[1:], self.lam, strict=True)):
            h.requires_grad_()
            out = stage(h)
            if k == len(targets):
                loss = cross_entropy(out, self.data[1])
            else:
                value, multiplier = targets[k]
                loss = beta * (value - out).square().sum() / (2 * BATCH) - (multiplier * (value - out)).sum()
            found += torch.autograd.grad(loss, h)
        return found


def test_o5_the_error_of_the_penalty_falls_with_one_over_beta():
    errors, violations = [], []
    # The stiffer the penalty, the more sweeps until nothing moves any more.
    for beta, enough in ((10.0, 150), (100.0, 200), (1e3, 300)):
        sweeps = Sweeps(beta=beta, theta=0.25)
        error = [sweeps.step() for _ in range(enough)][-1]
        errors.append(error)
        violations.append(beta * sweeps.violation())
    assert [a / b for a, b in pairwise(errors)] == pytest.approx([10, 10], rel=0.1)
    assert violations[1] == pytest.approx(violations[2], rel=0.05)


@pytest.mark.parametrize("correction", ["chain-rule", "explicit"])
@pytest.mark.parametrize("form", ["penalty", "lagrangian"])
def test_o7_a_full_step_gives_the_shifted_state_and_the_adjoint_as_multiplier(form, correction):
    beta, states = 50.0, truth(residual_net(), *batch())[0]
    kappa = [torch.zeros_like(state) for state in states]
    multipliers = {"kappa_input": 1.0, "multiplier": lambda border, x, y: kappa[border - 1]}
    chosen = multipliers if form == "lagrangian" else {}
    sweeps = Sweeps(random_like(states), beta=beta, form=form, correction=correction, **chosen)
    for _ in range(3):
        arriving, p = sweeps.arriving(), sweeps.local_adjoints(kappa, beta)
        sweeps.step()
        for border, (x, adjoint, lam) in enumerate(zip(arriving, p, sweeps.lam, strict=True)):
            shifted = x - (adjoint - kappa[border]) * BATCH / beta
            torch.testing.assert_close(lam, shifted, rtol=0, atol=1e-12)
            renewed = kappa[border] - beta * (lam - x) / BATCH
            torch.testing.assert_close(renewed, adjoint, rtol=0, atol=1e-12)
            if form == "lagrangian":
                kappa[border] = renewed


def test_o8_states_and_adjoints_are_exact_after_two_sweeps_per_border():
    """lam <- x and kappa <- p, the multipliers set by hand: exact after 2(K-1) sweeps and not earlier."""
    states = truth(residual_net(), *batch())[0]
    kappa = [torch.zeros_like(state) for state in states]
    sweeps = Sweeps(
        random_like(states),
        form="lagrangian",
        multiplier=lambda border, x, y: kappa[border - 1],
        pull=0.0,
        adjoint=0.0,
        kappa_input=0.0,
    )
    errors = []
    for _ in range(2 * (STAGES - 1) + 2):
        p = sweeps.local_adjoints(kappa, beta=0.0)
        errors.append(sweeps.step())
        kappa[:] = p
    assert all(error > 1e-3 for error in errors[: 2 * (STAGES - 1)])
    assert all(error < 1e-14 for error in errors[2 * (STAGES - 1) :])


def test_o8_replay_is_exact_one_step_per_border_later():
    """Its multipliers are the adjoints that the stage above found; each handles a batch a step after that one."""
    states = truth(residual_net(), *batch())[0]
    sweeps = Sweeps(random_like(states), form="lagrangian", multiplier="replay", pull=0.0, adjoint=0.0, kappa_input=0.0)
    errors = [sweeps.step() for _ in range(3 * (STAGES - 1) + 2)]
    assert errors[: STAGES - 1] == [None] * (STAGES - 1)
    assert all(error > 1e-3 for error in errors[STAGES - 1 : 3 * (STAGES - 1)])
    assert all(error < 1e-14 for error in errors[3 * (STAGES - 1) :])


@pytest.mark.parametrize(("theta", "converges"), [(1.0, False), (0.5, False), (0.25, True), (0.1, True)])
def test_o10_simultaneous_corrections_need_a_small_theta(theta, converges):
    states = truth(residual_net(), *batch())[0]
    sweeps = Sweeps(random_like(states), beta=1e3, theta=theta)
    sweeps.step()
    first = sweeps.violation()
    for _ in range(60):
        sweeps.step()
    assert (sweeps.violation() < 0.2 * first) == converges
