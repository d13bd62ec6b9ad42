"""When prediction is exact, and what gradient DTR takes: oracles 11, 12 and 17 on the running engine."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import mse_loss

import unlatch
from recording import Forwards, Optimizers, RecordingSGD, Scripted, feed, listening, stages_of
from small_nets import tanh_net, vectors
from unlatch.methods import DTR, DTRP
from unlatch.transport.mail import BACKWARD

STAGES = 4
#: Rounds after which every stage has updates behind it that a predictor can look at.
WARM = 2 * STAGES


def build(method, optimizer, model=None, loss_fn=mse_loss):
    return unlatch.parallelize(
        model if model is not None else tanh_net(STAGES),
        method,
        stages=STAGES,
        loss_fn=loss_fn,
        optimizer=optimizer,
        split=[str(k) for k in range(1, STAGES)],
    )


def activation_gaps(run, data):
    """Per stage below the last, by how much the second forward of each batch differs from the first."""
    watched = [Forwards(stage.module) for stage in stages_of(run)[:-1]]
    feed(run, data)
    return [forwards.lateness() for forwards in watched]


def own_gaps(predict, optimizer, data, loss_fn=mse_loss):
    return activation_gaps(build(DTRP(microbatches=1, predict=predict), optimizer, loss_fn=loss_fn), data)


def test_oracle_11_difference_is_exact_on_a_straight_line():
    data = vectors(20)
    predicted = own_gaps("difference", Optimizers(Scripted), data)
    unpredicted = own_gaps("none", Optimizers(Scripted), data)
    for lateness in predicted:
        assert max(lateness[WARM:]) < 1e-14
    for lateness in unpredicted:
        assert min(lateness[WARM:]) > 1e-3


@pytest.mark.parametrize("nesterov", [False, True])
def test_oracle_12_geometric_is_exact_while_coasting(nesterov):
    """From some batch on every gradient is zero, and momentum alone moves the weights."""
    data, still = vectors(30), 12

    def fading(out, target):
        return mse_loss(out, target[:, 1:]) * target[0, 0]

    weighted = [
        (x, torch.cat([torch.full((len(y), 1), float(i < still), dtype=y.dtype), y], dim=1))
        for i, (x, y) in enumerate(data)
    ]

    def lateness(predict):
        sgd = Optimizers(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=nesterov)
        return own_gaps(predict, sgd, weighted, loss_fn=fading)

    # Gradients still to come at the first forward of a batch are zero from here on.
    since = still + WARM
    for stage in lateness("coasting"):
        assert max(stage[since:]) < 1e-14
    for stage in lateness("linear"):
        assert max(stage[since:]) > 1e-5
    if not nesterov:
        for stage in lateness("geometric"):
            assert max(stage[since:]) < 1e-14


def test_oracle_17_gradient_is_taken_at_the_current_weights():
    """g = d/dW <F(h; W), d>, with the kept input, the received cotangent and the weights of the moment."""
    model, data = tanh_net(STAGES), vectors(10)
    optimizers = Optimizers(RecordingSGD, lr=0.1, momentum=0.9)
    run = build(DTR(microbatches=1), optimizers, model)
    watched = [Forwards(stage.module) for stage in stages_of(run)]
    with listening() as sent:
        feed(run, data)

    for k in range(STAGES - 1):
        received = [message.payload[0][0] for message in sent if (message.kind, message.stage) == (BACKWARD, k)]
        assert len(received) == len(data)
        for i in range(len(data)):
            h, d = watched[k].inputs[i], received[i]
            weight, bias = optimizers[k].weights[i]

            def inner_product(w, h=h, d=d, bias=bias):
                return (torch.tanh(h @ w.T + bias) * d).sum()

            w = weight.clone().requires_grad_()
            inner_product(w).backward()
            assert torch.allclose(w.grad, optimizers[k].gradients[i][0], rtol=0, atol=1e-14)

            step = torch.zeros_like(weight)
            step[1, 2] = 1e-6
            slope = (inner_product(weight + step) - inner_product(weight - step)) / 2e-6
            assert slope.item() == pytest.approx(optimizers[k].gradients[i][0][1, 2].item(), abs=1e-9)


def test_oracle_17_with_a_perfect_predictor_it_is_backpropagation_at_staggered_weights():
    """On a straight line the difference predictor is perfect: batch i meets version i at every stage, both times."""
    model, data = tanh_net(STAGES), vectors(20)
    optimizers = Optimizers(Scripted)
    start = [p.detach().clone() for p in model.parameters()]
    feed(build(DTRP(microbatches=1, predict="difference"), optimizers, model), data)
    lines = [u for optimizer in optimizers.made for u in optimizer.u]
    truth = tanh_net(STAGES)
    for i in range(WARM, len(data)):
        with torch.no_grad():
            for p, w, u in zip(truth.parameters(), start, lines, strict=True):
                p.copy_(w + i * u)
        truth.zero_grad()
        mse_loss(truth(data[i][0]), data[i][1]).backward()
        found = [g for optimizer in optimizers.made for g in optimizer.gradients[i]]
        for p, g in zip(truth.parameters(), found, strict=True):
            assert (p.grad - g).abs().max() < 1e-13


def test_oracle_17_without_prediction_it_is_not():
    model, data = tanh_net(STAGES), vectors(20)
    optimizers = Optimizers(Scripted)
    start = [p.detach().clone() for p in model.parameters()]
    feed(build(DTR(microbatches=1), optimizers, model), data)
    lines = [u for optimizer in optimizers.made for u in optimizer.u]
    truth, i = tanh_net(STAGES), len(data) - 1
    with torch.no_grad():
        for p, w, u in zip(truth.parameters(), start, lines, strict=True):
            p.copy_(w + i * u)
    mse_loss(truth(data[i][0]), data[i][1]).backward()
    found = [g for optimizer in optimizers.made for g in optimizer.gradients[i]]
    assert max((p.grad - g).abs().max() for p, g in zip(truth.parameters(), found, strict=True)) > 1e-6
