"""Stages on torch's `meta` device, where nothing is computed and every mix-up of devices is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unlatch
from unlatch.nn.chain import StageChain, chain
from unlatch.nn.device import Device
from unlatch.nn.tree import map_tensors
from unlatch.runtime.stage import Stage, StageOptions
from unlatch.transport.mail import Micro


class Meta(Device):
    """Tensors without values: a loss cannot be read."""

    def here(self, tree: Any) -> Any:
        return map_tensors(lambda t: t.to("meta"), tree)

    def reading(self, number: Tensor) -> float:
        assert number.device.type == "meta"
        return 0.0


def stages_of(method: unlatch.methods.Method, count: int) -> list[Stage]:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)) for _ in range(2 * count)])
    options = StageOptions(
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        clip_grad_norm=1.0,
        nonfinite="ignore",
        device=Meta("meta"),
    )
    blocks = chain(net.to("meta"))
    delays = method.crossed(count)
    parts = [StageChain(blocks[2 * k : 2 * k + 2], net) for k in range(count)]
    return [Stage(k, count, part, method.rules(), options, delay=delays[k]) for k, part in enumerate(parts)]


METHODS = ("bp", "pipedream", "ddg", "fr", "fdg", "dtr", "dtrp", "asyncpp", "paci", "xpipe", "cgad", "pipedream-2bw")


@pytest.mark.parametrize("method", METHODS)
def test_forward_backward_and_update_stay_on_the_device(method):
    stages = stages_of(unlatch.methods.get(method), 3)
    for number in range(3):
        micro = Micro(id=number, batch=number, index=0, count=1, size=6, scale=1.0, update=number, ends=True)
        # Batches come from the host.
        x, y = torch.randn(6, 4), torch.randn(6, 4)
        for stage in stages:
            x = stage.forward(micro, x, y if stage.last else None)
        gradients = None
        for stage in reversed(stages):
            gradients = stage.backward(micro, gradients).gradients
            stage.update()
    for stage in stages:
        assert all(p.is_meta for p in stage.params)
        assert stage.updater.optimizer is not None
        assert all(s["exp_avg"].is_meta for s in stage.updater.optimizer.state.values())


class Shifted(nn.Module):
    """Names the CPU where it should not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(4, device="cpu")


def test_a_mix_up_is_found():
    (stage,) = stages_of(unlatch.methods.get("bp"), 1)
    stage.module.blocks[0][0] = Shifted()
    micro = Micro(id=0, batch=0, index=0, count=1, size=6, scale=1.0, update=0, ends=True)
    with pytest.raises(RuntimeError, match=r"meta|device"):
        stage.forward(micro, torch.randn(6, 4), torch.randn(6, 4))
