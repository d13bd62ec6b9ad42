"""A method that somebody writes outside of the library, with a predictor and a step size of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.nn.functional import mse_loss

import unlatch
from recording import stages_of
from small_nets import tanh_net, vectors
from unlatch.methods import Delayed
from unlatch.rules.activations import Graph
from unlatch.rules.predict import Predictor
from unlatch.rules.updates import UpdateRule
from unlatch.rules.weights import Stash
from unlatch.schedule import one_f_one_b_async


@dataclass(frozen=True)
class LookAhead(Predictor):
    kind = "look-ahead"

    def advance(self, bucket, optimizer, steps, history):
        moving = bucket.having("exp_avg")
        for w, mean, square in zip(moving.out, moving.state("exp_avg"), moving.state("exp_avg_sq"), strict=True):
            w.addcdiv_(mean, square.sqrt().add_(1e-8), value=-moving.lr * self.regulator(steps))


@dataclass(frozen=True)
class SlowerWhereLate(UpdateRule):
    def scale(self, place):
        return 1.0 / (1 + place.delay)

    def tune(self, optimizer, place):
        for group in optimizer.param_groups:
            group["betas"] = (1.0 - 0.1 / (1 + place.delay), group["betas"][1])


@dataclass(frozen=True)
class Foresight(Delayed):
    predict: str | Predictor = LookAhead()
    name = "foresight"
    summary = "pipedream at weights that NAdam is heading for"

    def schedule(self, stages):
        return one_f_one_b_async(stages)

    def rules(self):
        return self._rules(Graph(), Stash(), update=SlowerWhereLate())


def begun(method, seed=0, stages=3):
    return unlatch.parallelize(
        tanh_net(3, seed=seed),
        method,
        stages=stages,
        split=["1", "2"][: stages - 1],
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.NAdam, lr=0.01),
    )


def trained(run, batches):
    for x, y in batches:
        run.step(x, y)
    run.flush()
    return [p.detach().clone() for p in run.module().parameters()]


def test_an_unknown_predictor_is_no_error_and_has_no_advice(caplog):
    run = begun(Foresight(microbatches=1))
    assert "no model of this predictor" in run.advice.unknown
    assert caplog.messages == []
    assert "no predictor LookAhead" in run.method.closed_form(3)


def test_rules_know_their_stage():
    run = begun(Foresight(microbatches=1))
    assert [s.updater.lr_factor() for s in stages_of(run)] == pytest.approx([1 / 3, 1 / 2, 1.0])
    betas = [s.updater.optimizer.param_groups[0]["betas"][0] for s in stages_of(run)]
    assert betas == pytest.approx([1 - 0.1 / 3, 1 - 0.1 / 2, 0.9])


def test_its_forwards_see_what_it_predicts():
    own, plain = (
        trained(begun(Foresight(microbatches=1)), vectors(8)),
        trained(begun(Foresight(microbatches=1, predict="none")), vectors(8)),
    )
    assert not torch.equal(own[0], plain[0])
    # One stage is never late, so nothing is predicted there.
    alone = [trained(begun(Foresight(microbatches=1, predict=p), stages=1), vectors(4)) for p in (LookAhead(), "none")]
    assert all(torch.equal(p, q) for p, q in zip(*alone, strict=True))


def test_it_goes_on_after_a_checkpoint(tmp_path):
    method = Foresight(microbatches=2)
    run = begun(method)
    for x, y in vectors(5):
        run.step(x, y)
    run.save(tmp_path / "checkpoint")
    again = begun(method, seed=4)
    again.load(tmp_path / "checkpoint")
    rest = vectors(5, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(trained(run, rest), trained(again, rest), strict=True))
