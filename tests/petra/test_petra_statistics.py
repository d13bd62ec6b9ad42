"""Batch norm and dropout under PETRA: each batch counts once, in the chosen pass, and masks are drawn alike twice."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from recording import feed
from rev_nets import regression, rev_net, rev_run
from unlatch.methods import PETRA
from unlatch.nn import Coupling, invert

frozen = partial(torch.optim.SGD, lr=0.0)


def norms(model: nn.Module) -> list[nn.BatchNorm1d]:
    return [m for m in model.modules() if isinstance(m, nn.BatchNorm1d)]


@pytest.mark.parametrize("bn", ["forward", "backward"])
def test_each_batch_counts_once(bn: Any) -> None:
    """O18: after a flush every norm has counted every batch, and its averages are those of plain training."""
    model, data = rev_net("SRRDRH", norm=True), regression(20)
    plain = copy.deepcopy(model)
    feed(rev_run(model, PETRA(microbatches=1, bn=bn), frozen), data)
    for x, y in data:
        mse_loss(plain(x), y)
    for found, expected in zip(norms(model), norms(plain), strict=True):
        assert int(found.num_batches_tracked) == len(data)
        torch.testing.assert_close(found.running_mean, expected.running_mean, rtol=0, atol=1e-14)
        torch.testing.assert_close(found.running_var, expected.running_var, rtol=0, atol=1e-14)


def test_the_pass_that_counts() -> None:
    """O18: without a flush the forward has seen every batch, the backward of stage j all but the newest 2(J-1-j)."""
    counted = {}
    for bn in ("forward", "backward"):
        model = rev_net("SRRRH", norm=True)
        run = rev_run(model, PETRA(microbatches=1, bn=bn), frozen)
        for x, y in regression(20):
            run.step(x, y)
        counted[bn] = [int(norm.num_batches_tracked) for norm in norms(model)]
    assert counted == {"forward": [20, 20, 20], "backward": [14, 16, 18]}


def test_inverting_changes_no_statistics() -> None:
    """O18, second part."""
    block = Coupling(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).double()
    before = {name: t.clone() for name, t in block.state_dict().items()}
    invert(block, (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)))
    assert all(torch.equal(t, before[name]) for name, t in block.state_dict().items())


def test_evaluation_reads_the_statistics_that_were_counted() -> None:
    """O18, last part: there is one copy, and evaluation of the run and of the module agree."""
    model, data = rev_net("SRRH", norm=True), regression(12)
    run = rev_run(model, PETRA(microbatches=1), partial(torch.optim.SGD, lr=0.05))
    feed(run, data)
    module = run.module().eval()
    x, y = regression(1, seed=5)[0]
    with torch.no_grad():
        assert run.evaluate([(x, y)])["loss"] == pytest.approx(float(mse_loss(module(x), y)), rel=1e-12)


def test_dropout_masks_of_forward_and_inverse_agree() -> None:
    """With frozen weights the inverse is exact only if both passes draw the same masks."""
    run = rev_run(rev_net("SRRRH", dropout=0.4), PETRA(microbatches=1), frozen)
    results = feed(run, regression(20))
    assert max(s.reconstruction_error or 0.0 for s in run.statistics()) < 1e-14
    assert len({r.loss for r in results}) == 20


def test_dropout_masks_depend_on_the_seed_of_the_run_only() -> None:
    def losses(seed: int) -> list[float | None]:
        run = rev_run(rev_net("SRRRH", dropout=0.4), PETRA(microbatches=1), frozen, seed=seed)
        torch.manual_seed(torch.seed() % 1000)
        return [r.loss for r in feed(run, regression(6))]

    assert losses(1) == losses(1) != losses(2)
