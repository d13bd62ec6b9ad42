"""Predictions are made once where they would be equal, and cost no more passes over memory than they must."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, AdamW

import unlatch
from small_nets import tanh_net, vectors
from unlatch.methods import DTRP
from unlatch.rules.predict import Geometric, History, Linear
from unlatch.rules.updates import StagePlace
from unlatch.rules.weights import Predicted


@dataclass(frozen=True)
class Counting(Geometric):
    """Counts how far it was asked to look ahead, per stage."""

    asked: list[int] = field(default_factory=list, compare=False)

    def predict(self, params, optimizer, steps, history, out=None, rates=None):  # type: ignore[no-untyped-def]
        self.asked.append(steps)
        return super().predict(params, optimizer, steps, history, out, rates)


def begun(counting: Counting, microbatches: int) -> unlatch.Run:
    return unlatch.parallelize(
        tanh_net(3),
        DTRP(predict=counting, microbatches=microbatches),
        stages=3,
        loss_fn=mse_loss,
        optimizer=partial(SGD, lr=0.01, momentum=0.9, nesterov=True),
    )


def test_micro_batches_with_the_same_weights_ahead_share_a_prediction() -> None:
    counting, batches, parts = Counting(), 4, 4
    run = begun(counting, parts)
    for x, y in vectors(batches):
        run.step(x, y)
    run.flush()
    forwards = [(e.stage, e.batch // parts - e.version) for e in run.events if e.kind == "F"]
    ahead = {stage: [steps for s, steps in forwards if s == stage] for stage in range(3)}
    versions = {stage: [e.version for e in run.events if e.kind == "F" and e.stage == stage] for stage in range(3)}
    due = [
        steps
        for stage in range(3)
        for (_, steps), _ in groupby(zip(versions[stage], ahead[stage], strict=True))
        if steps > 0
    ]
    assert sorted(counting.asked) == sorted(due)
    assert len(due) < sum(steps > 0 for _, steps in forwards)


def test_weights_that_somebody_else_changed_are_predicted_anew() -> None:
    counting, params = Counting(), [nn.Parameter(torch.randn(3))]
    optimizer = SGD(params, lr=0.1, momentum=0.9, nesterov=True)
    view = Predicted(counting).at(params, optimizer, StagePlace(0, 2, 1, ("w",)))

    class Part:
        id, update = 5, 1

    def shown() -> list[torch.Tensor]:
        values, _ = view.values(Part(), 0, lambda updates: [[0.1] * updates], lasting=False)
        assert values is not None
        return values

    assert shown() is shown()
    assert counting.asked == [1]
    with torch.no_grad():
        params[0].add_(1.0)
    assert torch.equal(shown()[0], params[0])
    assert counting.asked == [1, 1]


def test_fused_forms_round_as_one_operation_after_the_other() -> None:
    """On lists of tensors of several shapes and memory formats, in single precision."""
    shapes = [(3, 5), (7,), (4, 3, 2, 2), ()]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)

    def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for _ in range(3):
            for p in params[:3]:  # the last one has no state
                p.grad = torch.randn_like(p)
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    heavy = stepped(SGD(params, lr=0.1, momentum=0.9))
    step = -0.1 * 3.0
    found = Linear().predict(params, heavy, 3, History(params))
    for p, w in zip(params[:3], found, strict=False):
        assert torch.equal(w, p.detach().clone().add_(heavy.state[p]["momentum_buffer"], alpha=step))
        assert w.stride() == p.stride()
    assert torch.equal(found[3], params[3])

    adam = stepped(AdamW(params, lr=0.01, weight_decay=0.1))
    found = Geometric().predict(params, adam, 1, History(params))
    for p, w in zip(params[:3], found, strict=False):
        state = adam.state[p]
        spread = state["exp_avg_sq"].sqrt().mul_(0.999**0.5 / (1.0 - 0.999**4) ** 0.5).add_(1e-8)
        expected = (
            p.detach().mul(1.0 - 0.01 * 0.1).addcdiv_(state["exp_avg"], spread, value=-(0.01 * 0.9) / (1 - 0.9**4))
        )
        assert torch.equal(w, expected)
    assert torch.equal(found[3], params[3])


@pytest.mark.parametrize("make", [partial(SGD, lr=0.1, momentum=0.9, nesterov=True), partial(Adam, lr=0.01)])
def test_predictions_leave_no_tensor_of_their_target_unwritten(make) -> None:  # type: ignore[no-untyped-def]
    """Parameters that the optimizer does not own, and those that have never moved, are predicted to stay."""
    params = [nn.Parameter(torch.randn(4)) for _ in range(3)]
    optimizer = make(params[:2])
    for p in (Linear(), Geometric()):
        history = p.history(params, optimizer)
        params[0].grad = torch.randn(4)
        history.before_step(params)
        optimizer.step()
        history.after_step(params)
        out = [torch.full((4,), float("nan")) for _ in params]
        found = p.predict(params, optimizer, 2, history, out)
        assert found[0].isfinite().all()
        assert not torch.equal(found[0], params[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1:], params[1:], strict=True))
