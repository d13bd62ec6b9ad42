"""A saved and loaded run goes on exactly as the one that was never stopped, with any optimizer and schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as schedules

import unlatch
from small_nets import tanh_net, vectors

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "groups": lambda params: torch.optim.SGD(
        [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "momentum": 0.5}], lr=0.05
    ),
}

SCHEDULES = {
    "none": None,
    "lambda": lambda o: schedules.LambdaLR(o, lambda n: 0.9**n),
    "multi-step": lambda o: schedules.MultiStepLR(o, [3, 6], gamma=0.1),
    "exponential": lambda o: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 9),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "one-cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=40),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=6), schedules.MultiStepLR(o, [1, 2])], [6]
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, total_iters=6), schedules.ExponentialLR(o, 0.9)]
    ),
}


def start(method, optimizer, schedule):
    return unlatch.parallelize(
        tanh_net(3),
        method,
        stages=3,
        loss_fn=mse_loss,
        optimizer=OPTIMIZERS[optimizer],
        lr_scheduler=SCHEDULES[schedule],
        split=["1", "2"],
    )


def train(run, data):
    for x, y in data:
        run.step(x, y)
    run.flush()
    return copy.deepcopy(run.module().state_dict())


def check(method, optimizer, schedule, path):
    data = vectors(10)
    run = start(method, optimizer, schedule)
    train(run, data[:4])
    run.save(path)
    unbroken = train(run, data[4:])
    again = start(method, optimizer, schedule)
    again.load(path)
    resumed = train(again, data[4:])
    for key, value in unbroken.items():
        assert torch.equal(resumed[key], value), key
    fresh = start(method, optimizer, schedule)
    fresh.load(path, optimizer=False)
    assert any(not torch.equal(value, unbroken[key]) for key, value in train(fresh, data[4:]).items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, tmp_path):
    check("dtrp", "sgd", schedule, tmp_path / "checkpoint")


@pytest.mark.parametrize("method", ["bp", "dtr"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, method, tmp_path):
    check(method, optimizer, "lambda", tmp_path / "checkpoint")


@pytest.mark.parametrize("predict", ["difference", "linear", "geometric", "constant-gradient"])
@pytest.mark.parametrize("method", ["dtrp", "pipedream"])
def test_predictors(method, predict, tmp_path):
    check(unlatch.methods.get(method, predict=predict), "sgd", "none", tmp_path / "checkpoint")


@pytest.mark.parametrize("method", ["asyncpp", "xpipe", "paci", "cgad", "pipedream-2bw"])
def test_rules_that_remember(method, tmp_path):
    check(unlatch.methods.get(method, microbatches=3), "sgd", "lambda", tmp_path / "checkpoint")


def test_another_optimizer_is_refused_with_advice(tmp_path):
    run = start("bp", "sgd", "none")
    train(run, vectors(2))
    run.save(tmp_path / "checkpoint")
    with pytest.raises(
        unlatch.errors.CheckpointMismatch, match=r"written with SGD, this run uses Adam.*optimizer=False"
    ):
        start("bp", "adam", "none").load(tmp_path / "checkpoint")
