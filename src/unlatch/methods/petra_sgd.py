"""The optimizer that PETRA was published with: its rate follows from the samples per update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD

from ..errors import ConfigError

__all__ = ["PetraSGD"]

_SAMPLES = 256


@dataclass(frozen=True)
class PetraSGD:
    """`optimizer=` for `parallelize`: SGD with Nesterov momentum and a learning rate of `base * samples / 256`.

    Norms and biases, that is parameters of one dimension, do not decay. The published runs also raise the rate in a
    straight line over the first 5 epochs and drop it to a tenth at fixed epochs; that is for `lr_scheduler=`.

    **Arguments:**

    - `samples`: per update, that is the batch size times `accumulate`; 64 k in published runs.
    - `base`: the rate for 256 samples.
    - `weight_decay`: published with 5e-4 for CIFAR-10 and 1e-4 for ImageNet.

    >>> [PetraSGD(64 * k).lr for k in (1, 2, 4, 8, 16, 32)]
    [0.025, 0.05, 0.1, 0.2, 0.4, 0.8]
    >>> optimizer = PetraSGD(128)(list(nn.Linear(2, 2).parameters()))
    >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    [(0.0005, 1), (0.0, 1)]
    """

    samples: int
    base: float = 0.1
    weight_decay: float = 5e-4
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ConfigError(f"PetraSGD: samples per update must be a whole number, at least 1, got {self.samples!r}")

    @property
    def lr(self) -> float:
        """The learning rate after the warm-up."""
        return self.base * self.samples / _SAMPLES

    def __call__(self, params: Sequence[nn.Parameter]) -> SGD:
        # Both groups at every stage, even if empty: a checkpoint then fits any number of stages.
        groups = [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return SGD(groups, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)
