"""Losses that count something else than samples."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from tied_nets import TiedLM, token_mean, token_sum, tokens
from unlatch.errors import NonFinite
from unlatch.methods import get
from unlatch.nn.heads import GradientSynthesiser


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


def test_a_micro_batch_of_nothing_but_padding_is_named() -> None:
    """It ended with NaN and the advice to lower the learning rate."""
    data = tokens(1, 4)
    data[0][1][2:] = -100
    method = get("gpipe", microbatches=2)
    for loss_fn in (token_mean, token_sum):
        run = unlatch.parallelize(
            TiedLM(), method, stages=1, loss_fn=loss_fn, optimizer=partial(torch.optim.SGD, lr=0.05)
        )
        if loss_fn is token_sum:
            assert math.isfinite(run.step(*data[0]).loss or math.nan)
        else:
            with pytest.raises(NonFinite, match=r"let loss_fn return \(sum, count\)"):
                run.step(*data[0])


def test_a_loss_that_fails_on_a_whole_batch_does_not_end_training() -> None:
    def picky(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(output) > 2:
            raise ValueError("two at a time")
        return token_mean(output, target)

    method = get("gpipe", microbatches=2)
    run = unlatch.parallelize(TiedLM(), method, stages=1, loss_fn=picky, optimizer=partial(torch.optim.SGD, lr=0.05))
    assert math.isfinite(run.step(*tokens(1, 4)[0]).loss or math.nan)
    run.flush()


def test_a_synthesiser_takes_labels_that_are_ignored() -> None:
    """Its embedding of labels was asked for row -100."""
    guess = GradientSynthesiser((3,), classes=2)
    x = torch.randn(3, 3)
    assert torch.equal(guess(x, torch.tensor([0, -100, 1]))[1], guess(x)[1])
