"""A reversible network in the style of i-RevNet: down-sampling by moving pixels into channels, so it can be undone.

Only the stem and the head are not reversible. Under PETRA no block in between keeps its input, at the price of longer
runs of inversions: an error made at the top reaches the bottom, for no stored input stops it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError
from ..nn.coupling import Coupling
from ..nn.permutation import SpaceToDepth
from .base import Chain
from .revnet_blocks import basic_branch, head, stem

__all__ = ["IRevNet"]


class IRevNet(Chain):
    """Groups of couplings; each group but the first begins with `SpaceToDepth(2)`, which quadruples the channels.

    Blocks: `stem`, `layer1.0`, ..., `head`. A branch of group g has `2**g width` channels between its convolutions, so
    that costs grow as in a ResNet and not as the channels do. Height and width must be multiples of `2**(groups-1)`.

    **Arguments:**

    - `counts`: blocks in each group.
    - `width`: channels of one stream in the first group.
    - `classes`, `in_channels`: of the data.
    - `zero_init`: branches return zero at first.

    >>> import torch
    >>> model = IRevNet((1, 1, 1), width=4, in_channels=1)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        counts: Sequence[int] = (3, 3, 3),
        *,
        width: int = 16,
        classes: int = 10,
        in_channels: int = 3,
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.stem = stem("small", in_channels, width)
        self._groups = len(counts)
        for index, count in enumerate(counts):
            if count < 1:
                raise ConfigError(f"each group needs a block, got {count} in group {index + 1} of {tuple(counts)}")
            channels, middle = width << 2 * index, width << index
            blocks: list[nn.Module] = [
                Coupling(basic_branch(channels, middle, zero_init=zero_init)) for _ in range(count)
            ]
            if index:
                blocks[0] = nn.Sequential(SpaceToDepth(2), blocks[0])
            self.add_module(f"layer{index + 1}", nn.Sequential(*blocks))
        self.head = head(width << 2 * (len(counts) - 1), classes)

    def blocks(self) -> list[nn.Module]:
        layers = [self.get_submodule(f"layer{index + 1}") for index in range(self._groups)]
        return [self.stem, *(block for layer in layers for block in layer.children()), self.head]
