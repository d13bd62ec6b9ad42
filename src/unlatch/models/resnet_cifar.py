"""Residual networks for small images: three groups of basic blocks, depth 6n+2 (ResNet-20, 32, 56, 110 and others)."""

from __future__ import annotations

from torch import nn

from ..errors import ConfigError
from .base import Chain
from .residual import BasicBlock, PoolHead, conv_norm_relu, init_convs

__all__ = ["CifarResNet"]


class CifarResNet(Chain):
    """Stem, three groups of n basic blocks with `width`, `2 width`, `4 width` channels, pooled linear head.

    Blocks: `stem`, `layer1.0` ... `layer3.{n-1}`, `head`. Any image size works, down to 8x8 digits.

    **Arguments:**

    - `depth`: 6n+2, for example 8, 14, 20, 32, 56, 110.
    - `classes`, `in_channels`: of the data.
    - `width`: channels of the first group.
    - `shortcut`: `"pad"` (average pooling and zero channels, no parameters) or `"conv"` (1x1 convolution and norm).
    - `stem_stride`: 2 halves all maps, for quick studies.

    >>> import torch
    >>> model = CifarResNet(8, in_channels=1)
    >>> model(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    >>> len(model.blocks())
    5
    """

    def __init__(
        self,
        depth: int = 20,
        *,
        classes: int = 10,
        in_channels: int = 3,
        width: int = 16,
        shortcut: str = "pad",
        stem_stride: int = 1,
    ) -> None:
        super().__init__()
        n, rest = divmod(depth - 2, 6)
        if rest or n < 1:
            raise ConfigError(f"depth {depth} is not 6n+2: expected 8, 14, 20, 26, 32, ... for a CIFAR ResNet")
        self.stem = conv_norm_relu(in_channels, width, stride=stem_stride)
        self.layer1 = _group(n, width, width, 1, shortcut)
        self.layer2 = _group(n, width, 2 * width, 2, shortcut)
        self.layer3 = _group(n, 2 * width, 4 * width, 2, shortcut)
        self.head = PoolHead(4 * width, classes)
        init_convs(self)

    def blocks(self) -> list[nn.Module]:
        return [self.stem, *self.layer1, *self.layer2, *self.layer3, self.head]


def _group(count: int, inputs: int, width: int, stride: int, shortcut: str) -> nn.Sequential:
    first = BasicBlock(inputs, width, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(width, width, 1, shortcut) for _ in range(count - 1)))
