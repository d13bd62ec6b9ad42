"""Invertible changes of shape: they only move elements, so their inverse is exact and is also their transpose.

With these a whole network can be reversible: `SpaceToDepth` trades image size for channels on every stream, as in
i-RevNet, and `Split` and `Merge` lead from one tensor to two streams and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, PlanError
from .branch import as_stream
from .coupling import Streams
from .tree import Tree, map_tensors

__all__ = ["Merge", "Permutation", "SpaceToDepth", "Split"]


class Permutation(nn.Module, ABC):
    """Base of modules that only move elements. Subclasses give `forward` and `inverse`; the gradient follows."""

    @abstractmethod
    def inverse(self, state: Any) -> Any:
        """The input that gives the output `state`."""

    def pull_back(self, state: Tree, grad: Tree) -> tuple[Tree, Tree]:
        """From output and its gradient to input and its gradient; nothing is differentiated."""
        return self.inverse(state), self.inverse(grad)


class Split(Permutation):
    """Cut a tensor into two streams of half the channels: `(first half, second half)`.

    >>> x, carried = Split()(torch.zeros(2, 6, 4, 4))
    >>> x.shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Streams:
        if not -x.dim() <= self.dim < x.dim():
            raise PlanError(
                f"Split({self.dim}) cannot cut a tensor of shape {tuple(x.shape)}, which has no such dimension"
            )
        channels = x.shape[self.dim]
        if channels % 2:
            raise PlanError(
                f"{channels} channels do not split into two equal streams (input {tuple(x.shape)}, dimension "
                f"{self.dim}): give the block before Split an even number of channels"
            )
        first, second = as_stream(x).chunk(2, self.dim)
        # Streams live on their own: a view would keep the other half in memory.
        return first.clone(), second.clone()

    def inverse(self, state: Streams) -> Tensor:
        return torch.cat(tuple(state), self.dim)


class Merge(Permutation):
    """Join two streams into one tensor: the inverse of `Split`.

    >>> Merge()((torch.zeros(2, 3), torch.ones(2, 3))).shape
    torch.Size([2, 6])
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.split = Split(dim)

    def forward(self, state: Streams) -> Tensor:
        return self.split.inverse(state)

    def inverse(self, state: Tensor) -> Streams:
        streams: Streams = self.split(state)
        return streams


class SpaceToDepth(Permutation):
    """Invertible down-sampling of images, of every stream: `block` x `block` patches become channels.

    >>> state = (torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8))
    >>> down = SpaceToDepth(2)
    >>> small = down(state)
    >>> small[0].shape
    torch.Size([1, 12, 4, 4])
    >>> torch.equal(down.inverse(small)[1], state[1])
    True
    """

    def __init__(self, block: int = 2) -> None:
        super().__init__()
        if block < 1:
            raise ConfigError(f"SpaceToDepth needs patches of 1 or more pixels a side, got {block!r}")
        self.block = block

    def forward(self, state: Tree) -> Tree:
        return map_tensors(self._down, state)

    def inverse(self, state: Tree) -> Tree:
        return map_tensors(lambda x: F.pixel_shuffle(x, self.block), state)

    def _down(self, x: Tensor) -> Tensor:
        if x.dim() < 3 or x.shape[-1] % self.block or x.shape[-2] % self.block:
            raise PlanError(
                f"SpaceToDepth({self.block}) needs maps whose height and width are multiples of {self.block}, got "
                f"{tuple(x.shape)}: pad the images, or down-sample fewer times"
            )
        return F.pixel_unshuffle(x, self.block)
