"""Every delayed method follows the queue-free recursion, in float64."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from unlatch.methods import get
from unlatch.reference import SGD, recursion

DELAYED = ["pipedream", "ddg", "fr", "fdg", "adl", "dsp", "dtr", "dtrp"]


def net(stages: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(stages)]).double()


def batches(count: int, size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 5, generator=generator, dtype=torch.float64),
            torch.randn(size, 5, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def train(model, method, stages, data, sgd: SGD):
    run = unlatch.parallelize(
        model,
        method,
        stages=stages,
        loss_fn=mse_loss,
        optimizer=partial(
            torch.optim.SGD, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov, weight_decay=sgd.weight_decay
        ),
        split=[str(i) for i in range(1, stages)],
    )
    losses = [r.loss for r in (run.step(x, y) for x, y in data) if r.loss is not None]
    losses += [r.loss for r in run.flush()]
    return losses


def expected(model, method, stages, data, sgd: SGD, **options):
    """The recursion for a method object, straight from its lateness."""
    lateness, m = method.lateness(stages), method.microbatches
    micros = [part for x, y in data for part in zip(x.tensor_split(m), y.tensor_split(m), strict=True)]
    per_update = m * method.accumulate
    return recursion(
        list(model),
        micros,
        mse_loss,
        sgd,
        lambda k, i: max(0, i - lateness[k]) // per_update,
        per_update=per_update,
        backward=method.rules().backward.taken_at,
        mixed=method.rules().mixes,
        **options,
    )


def check(name, stages, sgd, steps=9, tolerance=0.0, **options):
    predict = options.get("predict", "geometric" if name == "dtrp" else "none")
    method = get(name, **{"microbatches": 1, **options})
    data = batches(steps * method.accumulate)
    model = net(stages)
    truth = expected(
        copy.deepcopy(model), method, stages, data, sgd, predict=predict, gamma=method.gamma, shrink=method.shrink
    )
    losses = train(model, method, stages, data, sgd)
    for k, part in enumerate(model):
        for key, value in truth.weights[k][-1].items():
            difference = (part.get_parameter(key) - value).abs().max().item()
            assert difference <= tolerance, (name, k, key, difference)
    assert len(losses) == len(data)
    m = method.microbatches
    means = [sum(truth.losses[i : i + m]) / m for i in range(0, len(truth.losses), m)]
    assert losses == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", DELAYED)
def test_exact_without_momentum(name, stages):
    check(name, stages, SGD(0.1), predict="none")


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", DELAYED)
def test_exact_with_momentum_and_decay(name, stages):
    check(name, stages, SGD(0.05, momentum=0.9, weight_decay=1e-2), predict="none")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("predict", ["difference", "linear", "geometric", "constant-gradient"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["dtrp", "fdg", "pipedream"])
def test_predictors(name, stages, predict, nesterov):
    # Prediction sums the same terms in another order, hence rounding.
    check(name, stages, SGD(0.05, momentum=0.9, nesterov=nesterov, weight_decay=1e-2), predict=predict, tolerance=1e-13)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches(name, microbatches):
    check(name, 3, SGD(0.05, momentum=0.9, nesterov=True), microbatches=microbatches, predict="none", tolerance=1e-15)


@pytest.mark.parametrize("name", DELAYED)
def test_accumulation(name):
    check(name, 3, SGD(0.05, momentum=0.9), accumulate=3, predict="none", tolerance=1e-15)


@pytest.mark.parametrize("name", ["fdg", "dtrp"])
def test_gamma_and_shrink(name):
    check(name, 4, SGD(0.05, momentum=0.9), gamma=0.5, predict="none", tolerance=1e-15)
    check(name, 4, SGD(0.05, momentum=0.9), shrink=0.5, predict="none", tolerance=1e-15)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipedream_2bw_is_one_update_behind_everywhere(stages):
    sgd, method = SGD(0.05, momentum=0.9), get("pipedream-2bw", microbatches=stages)
    data, model = batches(7), net(stages)
    truth = recursion(
        list(copy.deepcopy(model)),
        [part for x, y in data for part in zip(x.tensor_split(stages), y.tensor_split(stages), strict=True)],
        mse_loss,
        sgd,
        lambda k, i: max(0, i // stages - 1),
        per_update=stages,
    )
    train(model, method, stages, data, sgd)
    for k, part in enumerate(model):
        for key, value in truth.weights[k][-1].items():
            torch.testing.assert_close(part.get_parameter(key), value, rtol=0, atol=1e-15)


@settings(max_examples=30)
@given(
    name=st.sampled_from(DELAYED),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    steps=st.integers(1, 6),
    nesterov=st.booleans(),
    predict=st.sampled_from(["none", "difference", "geometric"]),
)
def test_any_combination(name, stages, microbatches, accumulate, steps, nesterov, predict):
    sgd = SGD(0.03, momentum=0.9, nesterov=nesterov, weight_decay=1e-3)
    options = {"microbatches": microbatches, "accumulate": accumulate, "predict": predict}
    check(name, stages, sgd, steps=steps, tolerance=1e-13, **options)
