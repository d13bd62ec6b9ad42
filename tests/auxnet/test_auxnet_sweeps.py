"""Oracles about repeated corrections at fixed weights (O5, O7, O8, O10), on stored auxiliary variables."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch
from border_cases import SPLIT, STAGES, batch, random_like, residual_net, stages_of_net, truth
from recording import Optimizers, RecordingSGD
from unlatch.methods import AuxVar
from unlatch.methods.auxnet.records import BorderValues
from unlatch.methods.auxnet.sources import Raw, Source
from unlatch.transport.mail import Micro


class Sweeps:
    """Weights stand still; every step is one simultaneous correction of all stored variables."""

    def __init__(self, start: list[Tensor] | None = None, **options) -> None:
        self.net, self.data = residual_net(), batch()
        self.optimizers = Optimizers(RecordingSGD, lr=0.0)
        self.run = unlatch.parallelize(
            self.net,
            AuxVar(units="sum", measure=1, **options),
            stages=STAGES,
            loss_fn=cross_entropy,
            optimizer=self.optimizers,
            split=SPLIT,
            sample=self.data,
        )
        self.states, self.adjoints, self.gradients = truth(self.net, *self.data)
        self.stations = [self.run.stations[k] for k in range(1, STAGES)]
        self.sources = [station.source for station in self.stations]
        if start is not None:
            # The first batch introduces the samples; then they are moved elsewhere.
            self.step()
            for source, value in zip(self.sources, start, strict=True):
                # Multipliers begin at zero.
                source.load_tensors({"inputs": value})

    def step(self) -> float:
        """One sweep; the largest error of any stage's gradient, relative to that of backpropagation."""
        self.run.step(*self.data)
        errors = []
        for optimizer, expected in zip(self.optimizers.made, self.gradients, strict=True):
            found = torch.cat([g.flatten() for g in optimizer.gradients[-1]])
            true = torch.cat([g.flatten() for g in expected])
            errors.append(float((found - true).norm() / true.norm()))
        return max(errors)

    def violation(self) -> float:
        return max(station.records[-1].violation for station in self.stations)


@pytest.mark.parametrize("form", ["penalty", "lagrangian"])
def test_o7_a_full_step_gives_the_shifted_state_and_the_adjoint_as_multiplier(form):
    states = truth(residual_net(), *batch())[0]
    beta = 50.0
    sweeps = Sweeps(random_like(states), form=form, beta=beta, theta=1.0)
    raw, micro = Raw(*sweeps.data), Micro(0, 0, 0, 1, 5, 1.0, 0, True)
    outputs = [_newest_output(stage) for stage in stages_of_net(sweeps.net)[:-1]]
    met = [_newest_values(source) for source in sweeps.sources]
    for _ in range(2):
        before = [source.multiplier(raw) for source in sweeps.sources]
        seen = [source.predict(micro, raw, keep=False) for source in sweeps.sources]
        sweeps.step()
        for source, kappa, lam, (x,), (values,) in zip(sweeps.sources, before, seen, outputs, met, strict=True):
            p, stored = values.p, source.tensors()
            shift = p if kappa is None else p - kappa
            torch.testing.assert_close(stored["inputs"], x - shift * len(x) / beta, rtol=0, atol=1e-13)
            assert not torch.equal(stored["inputs"], lam)
            if form == "lagrangian":
                torch.testing.assert_close(stored["multipliers"], p, rtol=0, atol=1e-13)


def _newest_output(stage: nn.Sequential) -> list[Tensor]:
    found: list[Tensor] = []
    stage[-1].register_forward_hook(lambda module, inputs, out: found.__setitem__(slice(None), [out.detach()]))
    return found


def _newest_values(source: Source) -> list[BorderValues]:
    found: list[BorderValues] = []
    correct = source.correct

    def listen(micro: Micro, raw: Raw, values: BorderValues) -> None:
        found[:] = [values]
        correct(micro, raw, values)

    source.correct = listen
    return found


def test_o8_states_and_adjoints_are_exact_after_two_sweeps_per_border():
    states = truth(residual_net(), *batch())[0]
    # No pull and no adjoint in the correction: lam <- x, kappa <- p.
    sweeps = Sweeps(random_like(states), form="lagrangian", theta=1.0, pull=0.0, adjoint=0.0, kappa_input=0.0)
    errors = [sweeps.step() for _ in range(2 * (STAGES - 1) + 2)]
    assert all(error > 1e-3 for error in errors[: 2 * (STAGES - 1)])
    assert all(error < 1e-14 for error in errors[2 * (STAGES - 1) :])


def test_o5_the_error_of_the_penalty_falls_with_one_over_beta():
    errors, violations = [], []
    # The stiffer the penalty, the more sweeps until nothing moves any more.
    for beta, enough in ((10.0, 160), (100.0, 160), (1e3, 260), (1e4, 360)):
        sweeps = Sweeps(beta=beta, theta=0.25)
        for _ in range(enough):
            error = sweeps.step()
        errors.append(error)
        violations.append(beta * sweeps.violation())
    assert [a / b for a, b in pairwise(errors)] == pytest.approx([10, 10, 10], rel=0.1)
    assert violations[1:] == pytest.approx(violations[-1:] * 3, rel=0.05)


@pytest.mark.parametrize(("theta", "converges"), [(1.0, False), (0.25, True), (0.1, True)])
def test_o10_simultaneous_corrections_need_a_small_theta(theta, converges):
    states = truth(residual_net(), *batch())[0]
    sweeps = Sweeps(random_like(states), beta=1e3, theta=theta)
    sweeps.step()
    first = sweeps.violation()
    for _ in range(60):
        sweeps.step()
    assert (sweeps.violation() < 0.2 * first) == converges
