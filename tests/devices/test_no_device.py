"""Where there is no accelerator: nothing changes, and whoever asks for one is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import unlatch
from unlatch.nn.device import CPU, check_on_host, find_device


def made(**options):
    return unlatch.parallelize(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        stages=2,
        split=["1"],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        **options,
    )


def test_auto_is_the_cpu_and_moves_nothing():
    run = made()
    model = run.module()
    trained = [p for s in run.stations.values() for p in s.stage.module.parameters()]
    assert [id(p) for p in trained] == [id(p) for p in model.parameters()]
    assert find_device("auto") is CPU
    assert find_device(torch.device("cpu")) is CPU
    x = torch.ones(3)
    assert CPU.here(x) is x
    assert CPU.on_host(x) is x


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "finds no cuda device on this machine"),
        ("cuda:1", "finds no cuda device on this machine"),
        (torch.device("xpu"), "finds no xpu device on this machine"),
        ("meta", "finds no meta device"),
        ("gpu", 'device must be "auto", "cpu", the kind of an accelerator'),
        (None, 'device must be "auto", "cpu", the kind of an accelerator'),
        (1, "device must be"),
    ],
)
def test_a_device_that_is_not_there(device, said):
    with pytest.raises(unlatch.errors.ConfigError, match=said.replace("(", r"\(")):
        made(device=device)


def test_a_model_that_is_somewhere_else_already():
    class Elsewhere(nn.Module):
        def named_parameters(self, *args, **kwargs):
            yield "weight", type("Parameter", (), {"device": torch.device("cuda:0")})()

    with pytest.raises(unlatch.errors.ConfigError, match=r"the model is on cuda:0 \(weight\): build it on the CPU"):
        check_on_host(Elsewhere())
