"""Losses that count something else than samples."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch


def begun(method, loss_fn, **options) -> unlatch.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return unlatch.parallelize(model, method, stages=2, split=["2"], loss_fn=loss_fn, optimizer=optimizer, **options)


def weighted(output, target):
    classes, weights = target
    return (cross_entropy(output, classes, reduction="none") * weights).sum(), weights.sum()


def test_weights_that_add_up_to_less_than_one_give_their_mean():
    x, y = torch.randn(8, 4), (torch.randint(3, (8,)), torch.rand(8) * 0.05)
    with begun("bp", weighted) as run:
        with torch.no_grad():
            total, count = weighted(run.module()(x), y)
        assert 0 < count < 1
        assert run.evaluate([(x, y)])["loss"] == pytest.approx(float(total / count))
        assert run.step(x, y).loss == pytest.approx(float(total / count))


def test_layerpipe_notices_a_mean_over_something_else_than_samples():
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    y[0] = -100
    method = unlatch.methods.get("layerpipe", microbatches=4)
    with begun(method, cross_entropy, sample=(x, y)) as run:
        run.step(x, y)
        run.flush()
        assert any("mean over something else than samples" in note for note in run.notes)
