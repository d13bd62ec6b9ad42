"""Runs whose layers take a known time whatever else the machine does: they sleep."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from small_nets import vectors
from unlatch.methods import AuxNet
from unlatch.methods.local.statistics import LayerParallelTimes, layer_parallel_times

LAYERS = 4


class Sleeping(nn.Module):
    """A layer whose backward takes twice as long as its forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(5, 5).double(), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.layer(x)
        if out.requires_grad:
            out.register_hook(self._backward)
        return out

    def _backward(self, gradient: Tensor) -> Tensor:
        time.sleep(2 * self.seconds)
        return gradient


def sleeping_net(seconds: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Sleeping(seconds) for _ in range(LAYERS)])


def auxnet_step(seconds: float, aux_seconds: float, steps: int = 6) -> tuple[float, LayerParallelTimes]:
    """Seconds that a step of two stages takes by the clock on the wall, and the terms that the stages measured."""
    data = vectors(steps)
    with unlatch.parallelize(
        sleeping_net(seconds),
        AuxNet(factory=lambda border: Sleeping(aux_seconds)),
        stages=2,
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        split=[str(LAYERS // 2)],
        sample=data[0],
    ) as run:
        ends = []
        for x, y in data:
            run.step(x, y)
            ends.append(time.perf_counter())
        run.flush()
        times = layer_parallel_times(run.method_statistics())
    return median(b - a for a, b in pairwise(ends)), times


def serial_step(seconds: float, steps: int = 4) -> float:
    """Seconds that plain backpropagation takes for a batch."""
    net, ends = sleeping_net(seconds), []
    for x, y in vectors(steps):
        mse_loss(net(x), y).backward()
        ends.append(time.perf_counter())
    return median(b - a for a, b in pairwise(ends))
