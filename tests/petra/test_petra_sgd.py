"""The published learning-rate rule: linear in the samples per update, no decay of norms and biases."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import unlatch
from recording import feed, stages_of
from rev_nets import regression, rev_net, rev_run
from unlatch.errors import ConfigError
from unlatch.methods import PETRA, PetraSGD


def test_accumulated_batches_raise_the_rate_in_proportion() -> None:
    rates = {}
    for k in (1, 4):
        run = rev_run("SRRH", PETRA(microbatches=1, accumulate=k), PetraSGD(64 * k))
        rates[k] = [group["lr"] for stage in stages_of(run) for group in stage.updater.optimizer.param_groups]
    assert rates == {1: [0.025] * 8, 4: [0.1] * 8}


def test_only_matrices_decay() -> None:
    """With a gradient of zero the first update is the decay alone."""
    model = rev_net("SRRH", norm=True)
    before = copy.deepcopy(model)
    optimizer = PetraSGD(256, weight_decay=0.5, momentum=0.0)(list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, q in zip(model.parameters(), before.parameters(), strict=True):
        expected = q * (1 - 0.1 * 0.5) if p.dim() > 1 else q
        torch.testing.assert_close(p, expected, rtol=1e-14, atol=0)


def test_checkpoints_fit_other_numbers_of_stages(tmp_path: Path) -> None:
    """Four stages, then two: training goes on at the same weights and momenta, so the next update is the same."""
    data = regression(10)
    first = rev_run("SRRH", PETRA(microbatches=1), PetraSGD(64))
    feed(first, data)
    first.save(tmp_path / "last")
    moved = []
    for starts in (None, [2]):
        run = rev_run(rev_net("SRRH", seed=5), PETRA(microbatches=1), PetraSGD(64), starts)
        run.load(tmp_path / "last")
        feed(run, regression(1, seed=9))
        moved.append([p.detach().clone() for p in run.module().parameters()])
    for p, q in zip(*moved, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("predict", "weights"), [("none", "average"), ("geometric", "stash")])
def test_it_composes_with_prediction_and_step_sizes_per_stage(predict: str, weights: Any) -> None:
    method = PETRA(microbatches=2, predict=predict, gamma=0.9, weights=weights)
    losses = [r.loss or 0.0 for r in feed(rev_run("SRDRH", method, PetraSGD(128)), regression(8) * 5)]
    assert sum(losses[-8:]) < sum(losses[:8])


def test_bad_numbers() -> None:
    for samples in (0, 2.5, "64"):
        with pytest.raises(ConfigError, match="samples per update must be a whole number, at least 1"):
            PetraSGD(samples)  # type: ignore[arg-type]
    assert isinstance(unlatch.methods.PetraSGD(64), PetraSGD)
