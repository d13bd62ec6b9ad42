"""Half precision with a scaled loss: one stage is torch's `GradScaler`, many stages agree on scales, overflows pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import scaling_jobs
import unlatch
from unlatch.errors import ConfigError, NonFinite
from unlatch.runtime import scaling

#: Chains of every kind of order and of rule.
CHAINS = ("bp", "gpipe", "1f1b", "zb-h1", "pipedream", "pipedream-2bw", "ddg", "fr", "fdg", "dtr", "dtrp", "paci")


@pytest.mark.parametrize("method", ["bp", "pipedream", "dtr"])
def test_one_stage_is_torchs_scaler_bit_for_bit(method):
    """The third batch overflows at the first scale: both leave its update out, halve the scale, and go on."""
    data = scaling_jobs.data(large=(2,))
    with scaling_jobs.begun(method, 1) as run:
        losses = [run.step(x, y).loss for x, y in data]
        found = [p.detach().clone() for p in run.module().parameters()]
    expected_losses, expected, scale = scaling_jobs.plain_loop(data)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert scale == scaling.FIRST / 2
    assert run.stations[0].stage.scaling.of(99) == scale


@pytest.mark.parametrize("method", CHAINS)
def test_no_update_is_made_from_an_overflow_and_the_scale_falls(method):
    run = scaling_jobs.begun(method, 3)
    for x, y in scaling_jobs.data(large=(3, 4)):
        run.step(x, y)
    run.flush()
    scales = [station.stage.scaling for station in run.stations.values()]
    assert scaling.FIRST / 8 <= scales[-1].of(99) <= scaling.FIRST / 2
    assert all(p.isfinite().all() for p in run.module().parameters())
    assert not any(scale._of for scale in scales[:-1]), "every scale that was told was used"


@pytest.mark.parametrize("method", ["1f1b", "pipedream", "dtrp", "petra"])
def test_ranks_and_resume_agree_bit_for_bit(ranks2, method, tmp_path):
    expected = scaling_jobs.trained(method, None, distributed=False)
    for found in ranks2.run(scaling_jobs.trained, method, str(tmp_path / "checkpoint")):
        assert scaling_jobs.same(found, expected)
    for found in ranks2.run(scaling_jobs.resumed, method, str(tmp_path / "checkpoint")):
        assert scaling_jobs.same(found, expected)


def test_the_scale_grows_while_nothing_overflows(monkeypatch):
    monkeypatch.setattr(scaling, "INTERVAL", 3)
    run = scaling_jobs.begun("pipedream", 2)
    for x, y in scaling_jobs.data()[:6]:
        run.step(x, y)
    assert run.stations[1].stage.scaling.of(99) == 4 * scaling.FIRST


def test_what_is_not_finite_at_a_scale_of_one_is_an_error(monkeypatch):
    monkeypatch.setattr(scaling, "FIRST", 1.0)
    run = scaling_jobs.begun("bp", 2)
    with pytest.raises(NonFinite, match="gradient of"):
        run.step(*scaling_jobs.data(large=(0,), factor=1e10)[0])


def test_a_loss_that_is_not_finite_is_no_overflow():
    run = scaling_jobs.begun("bp", 2)
    x, y = scaling_jobs.data()[0]
    with pytest.raises(NonFinite, match="the loss of batch 0 is nan"):
        run.step(x, y * torch.nan)


@pytest.mark.parametrize(("method", "said"), [("dgl", "do not come down a chain"), ("cgad", "compares gradients")])
def test_methods_whose_gradients_are_not_those_of_one_loss(method, said):
    with pytest.raises(ConfigError, match=rf'precision="fp16" scales the loss, and {method} .*{said}'):
        unlatch.parallelize(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
            method,
            stages=2,
            split=["1"],
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            sample=(torch.randn(4, 4), torch.randn(4, 4)),
            precision="fp16",
        )
