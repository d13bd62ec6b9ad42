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

    The network that is trained needs no extra normalisation of its own: it is the prediction that adapts. As in batch
    norm, training normalises with the statistics of the batch and evaluation with running ones.

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
    own_mean: Tensor
    own_spread: Tensor
    own_seen: Tensor

    def __init__(self, parts: Sequence[nn.Module], shape: tuple[int, ...], *, rescale: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.rescale = rescale
        dtype = next((p.dtype for p in self.parts.parameters()), None)
        for whose in ("", "own_"):
            self.register_buffer(f"{whose}mean", torch.zeros(channel_shape(shape), dtype=dtype))
            self.register_buffer(f"{whose}spread", torch.ones(channel_shape(shape), dtype=dtype))
            self.register_buffer(f"{whose}seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tree) -> Tensor:
        for part in self.parts:
            x = part(x)
        out: Tensor = x
        if not self.rescale:
            return out
        wide = widened(out)
        if self.training:
            # What is only looked at, without a graph, was or will be counted with one.
            if torch.is_grad_enabled():
                self._note(wide.detach(), "own_")
            plain = normalised(wide)
        else:
            plain = (wide - self.own_mean) / self.own_spread
        return (plain * self.spread + self.mean).to(out.dtype)

    @torch.no_grad()
    def observe(self, target: Tensor) -> None:
        """Take note of the range of what should have been predicted."""
        if self.rescale:
            self._note(widened(target), "")

    @torch.no_grad()
    def _note(self, values: Tensor, whose: str) -> None:
        names = f"{whose}mean", f"{whose}spread"
        seen: Tensor = getattr(self, f"{whose}seen")
        weight = _MOMENTUM if int(seen) else 1.0
        # New tensors: a graph under way may still hold the old ones.
        for name, found in zip(names, channel_statistics(values), strict=True):
            setattr(self, name, getattr(self, name).lerp(found.to(getattr(self, name).dtype), weight))
        seen += 1
