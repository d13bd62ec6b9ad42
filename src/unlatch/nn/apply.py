"""A function as a block, for what a model computes between its modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from .tree import Tree

__all__ = ["Apply"]


class Apply(nn.Module):
    """A block that calls a function of the state.

    **Arguments:**

    - `function`: from what the block before puts out, and `uses`, to what the next block takes.
    - `uses`: modules, parameters and buffers of the model. They belong to this block, and the function gets them as
      further arguments: it should reach them in no other way, since blocks are copied to be measured.

    >>> import torch
    >>> Apply(lambda x: torch.flatten(x, 1))(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 12])
    >>> block = Apply(lambda x, layer: x + layer(x), nn.Linear(2, 2))
    >>> block(torch.zeros(1, 2)).shape, sum(p.numel() for p in block.parameters())
    (torch.Size([1, 2]), 6)
    """

    def __init__(self, function: Callable[..., Tree], *uses: nn.Module | Tensor) -> None:
        super().__init__()
        self._function, self._count = function, len(uses)
        for number, used in enumerate(uses):
            if isinstance(used, nn.Module):
                self.add_module(f"uses{number}", used)
            elif isinstance(used, nn.Parameter):
                self.register_parameter(f"uses{number}", used)
            else:
                self.register_buffer(f"uses{number}", used)

    def forward(self, x: Tree) -> Tree:
        return self._function(x, *(getattr(self, f"uses{number}") for number in range(self._count)))
