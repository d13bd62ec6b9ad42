"""A prediction brought to the range of what it predicts: channel by channel, the mean and spread seen lately."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .channels import channel_shape, channel_statistics, normalised, widened
from .tree import Tree

__all__ = ["Rescaled"]

_MOMENTUM = 0.1


class Rescaled(nn.Module):
    """Parts of a network in a row, whose output is normalised per channel and then given the target's mean and spread.

    The network that is trained needs no extra normalisation of its own: it is the prediction that adapts.

    **Arguments:**

    - `parts`: run one after the other.
    - `shape`: of one sample of the output.
    - `rescale`: `False` hands the output through.

    >>> net = Rescaled([nn.Linear(2, 3)], (3,))
    >>> target = 5 + 2 * torch.randn(64, 3)
    >>> net.observe(target)
    >>> out = net(torch.randn(64, 2))
    >>> bool((out.mean(0) - target.mean(0)).abs().max() < 1e-3)
    True
    """

    mean: Tensor
    spread: Tensor
    seen: Tensor

    def __init__(self, parts: Sequence[nn.Module], shape: tuple[int, ...], *, rescale: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.rescale = rescale
        dtype = next((p.dtype for p in self.parts.parameters()), None)
        self.register_buffer("mean", torch.zeros(channel_shape(shape), dtype=dtype))
        self.register_buffer("spread", torch.ones(channel_shape(shape), dtype=dtype))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tree) -> Tensor:
        for part in self.parts:
            x = part(x)
        out: Tensor = x
        if not self.rescale:
            return out
        return (normalised(widened(out)) * self.spread + self.mean).to(out.dtype)

    @torch.no_grad()
    def observe(self, target: Tensor) -> None:
        """Take note of the range of what should have been predicted."""
        if not self.rescale:
            return
        mean, spread = channel_statistics(widened(target))
        weight = _MOMENTUM if int(self.seen) else 1.0
        # New tensors: a graph under way may still hold the old ones.
        self.mean, self.spread = self.mean.lerp(mean, weight), self.spread.lerp(spread, weight)
        self.seen += 1
