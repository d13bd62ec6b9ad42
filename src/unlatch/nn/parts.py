"""Cuts inside of blocks: a residual block in two, its skip in the state between them.

A block is the smallest part of a model that has a name there. Where blocks are few and large, no cut between them is
even. A block that is a `Divisible` says how it falls into parts that are a chain again:

    x ---> layer2.0 ---> y          whole: the block itself
    x ---> layer2.0 ---(h, skip)---> layer2.0:1 ---> y          in parts

The parts hold the modules of the block, so parameters keep their names and there is one set of weights. A block is only
taken apart where it is cut: elsewhere the chain is what it was.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

from torch import nn

from .chain import Block

__all__ = ["Divisible", "in_parts", "part_names"]


class Divisible(nn.Module):
    """A block that can be cut inside.

    >>> import torch
    >>> class Twice(Divisible):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.second(self.first(x))
    ...     def parts(self):
    ...         return self.first, self.second
    >>> blocks = [Block("0", Twice()), Block("1", nn.Tanh())]
    >>> [block.name for block in in_parts(blocks)]
    ['0', '0:1', '1']
    """

    @abstractmethod
    def parts(self) -> Sequence[nn.Module]:
        """Modules whose composition is this block, bit for bit, forward and backward."""


def part_names(block: Block) -> list[str]:
    """What the parts of a block are called; the first goes by the name of the block."""
    count = len(block.module.parts()) if isinstance(block.module, Divisible) else 1
    return [block.name, *(f"{block.name}:{number}" for number in range(1, count))]


def in_parts(blocks: Sequence[Block], at: Collection[str] | None = None) -> list[Block]:
    """The same chain with blocks taken apart.

    **Arguments:** `at`: names of parts; only the blocks that these belong to are taken apart. By default all that can
    be.
    """
    found: list[Block] = []
    for block in blocks:
        names = part_names(block)
        wanted = names[1:] if at is None else set(names[1:]).intersection(at)
        if isinstance(block.module, Divisible) and wanted:
            found += [Block(name, part) for name, part in zip(names, block.module.parts(), strict=True)]
        else:
            found.append(block)
    return found
