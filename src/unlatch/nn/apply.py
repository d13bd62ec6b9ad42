"""A function as a block, for what a model computes between its modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .tree import Tree

__all__ = ["Apply"]


class Apply(nn.Module):
    """A block that calls a function of the state.

    **Arguments:**

    - `function`: from what the block before puts out to what the next one takes.
    - `uses`: modules, parameters and buffers of the model that the function reads, so that they belong to this block.

    >>> import torch
    >>> Apply(lambda x: torch.flatten(x, 1))(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 12])
    >>> layer = nn.Linear(2, 2)
    >>> sum(p.numel() for p in Apply(lambda x: x + layer(x), layer).parameters())
    6
    """

    def __init__(self, function: Callable[[Tree], Tree], *uses: nn.Module | Tensor) -> None:
        super().__init__()
        self._function = function
        for number, used in enumerate(uses):
            if isinstance(used, nn.Module):
                self.add_module(f"uses{number}", used)
            elif isinstance(used, nn.Parameter):
                self.register_parameter(f"uses{number}", used)
            else:
                self.register_buffer(f"uses{number}", used)

    def forward(self, x: Tree) -> Tree:
        return self._function(x)
