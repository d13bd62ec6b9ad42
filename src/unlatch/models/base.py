"""A chain: a model that is exactly the composition of its blocks, so that it can be cut between any two of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

__all__ = ["Chain"]


class Chain(nn.Module, ABC):
    """Base of all models here: say what the blocks are, and `forward` follows.

    Blocks are registered submodules, so their names in `named_modules()` name the places where the model can be cut.
    The caller may keep a block's input and use it again, hence a block must never change its input in place.

    >>> import torch
    >>> class Twice(Chain):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first = nn.Linear(4, 4)
    ...         self.second = nn.Linear(4, 2)
    ...     def blocks(self):
    ...         return [self.first, self.second]
    >>> Twice()(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The blocks in the order of the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks():
            x = block(x)
        return x
