"""Models to compare systems on, and systems that fail: importable, since they travel to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from unlatch.throughput import Subject, System
from unlatch.throughput.systems import Training

SGD = partial(torch.optim.SGD, lr=0.01)


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(4)))


def tied() -> nn.Module:
    model = layers()
    model[3][0].weight = model[0][0].weight
    return model


class Pair(nn.Module):
    """Passes on two tensors."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class Sum(nn.Module):
    """Takes two tensors."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def pairs() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), Pair(), Sum())


def batch(samples: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(samples, 16), torch.zeros(samples, 16)


def subject(model=layers, samples: int = 8) -> Subject:
    return Subject(model, partial(batch, samples), nn.functional.mse_loss, SGD)


def batches(count: int, samples: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(samples, 16, generator=generator), torch.randn(samples, 16)) for _ in range(count)]


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def learnt(system: System, one: Subject, data: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """On a rank: the weights that a system has after a pass over batches; nothing where it does not train."""
    training = system.start(one)
    if training is None:
        return {}
    for batch_of_all in data:
        training.feed(batch_of_all)
        training.step()
    training.flush()
    found = {name: tensor.clone() for name, tensor in training.weights().items()}
    training.close()
    return found


@dataclass(frozen=True)
class Broken(System):
    """Fails where it is started."""

    system = "broken"
    method = "on ranks"

    def start(self, subject: Subject) -> Training | None:
        raise RuntimeError("no such luck")
