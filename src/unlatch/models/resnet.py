"""Residual networks of four groups of blocks (ResNet-18, 34, 50), with a stem for large or for small images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError
from .base import Chain
from .residual import BasicBlock, Bottleneck, PoolHead, conv_norm_relu, init_convs

__all__ = ["ResNet", "resnet18", "resnet34", "resnet50"]


class ResNet(Chain):
    """Stem, four groups of blocks that halve the map and double the width, pooled linear head.

    Blocks: `stem`, `layer1.0` ... `layer4.{n-1}`, `head`.

    **Arguments:**

    - `groups`: number of blocks in each of the four groups.
    - `bottleneck`: three convolutions per block instead of two.
    - `classes`, `in_channels`: of the data.
    - `width`: channels of the first group.
    - `stem`: `"imagenet"` (7x7, stride 2, max pooling) or `"small"` (3x3, stride 1) for 32x32 images.

    >>> import torch
    >>> ResNet((1, 1, 1, 1), classes=10, width=8, stem="small")(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        groups: Sequence[int],
        *,
        bottleneck: bool = False,
        classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        stem: str = "imagenet",
    ) -> None:
        super().__init__()
        if len(groups) != 4 or min(groups) < 1:
            raise ConfigError(f"groups {tuple(groups)} do not suit a ResNet: expected four numbers of blocks, each > 0")
        kind, growth = (Bottleneck, 4) if bottleneck else (BasicBlock, 1)
        self.stem = _stem(stem, in_channels, width)
        inputs = width
        for i, count in enumerate(groups):
            outputs = width * 2**i
            group = nn.Sequential(kind(inputs, outputs, 1 if i == 0 else 2))
            group.extend(kind(growth * outputs, outputs) for _ in range(count - 1))
            self.add_module(f"layer{i + 1}", group)
            inputs = growth * outputs
        self.head = PoolHead(inputs, classes)
        init_convs(self)

    def blocks(self) -> list[nn.Module]:
        groups = [self.get_submodule(f"layer{i}") for i in range(1, 5)]
        return [self.stem, *(block for group in groups for block in group.children()), self.head]


def _stem(kind: str, inputs: int, width: int) -> nn.Sequential:
    if kind == "small":
        return conv_norm_relu(inputs, width)
    if kind == "imagenet":
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        return nn.Sequential(OrderedDict([*conv_norm_relu(inputs, width, 7, 2).named_children(), ("pool", pool)]))
    raise ConfigError(f"unknown stem {kind!r}: expected 'imagenet' (7x7, stride 2, pooling) or 'small' (3x3)")


def resnet18(*, classes: int = 1000, in_channels: int = 3, width: int = 64, stem: str = "imagenet") -> ResNet:
    """ResNet-18, 11.69 million parameters with 1000 classes.

    >>> len(resnet18(width=4).blocks())
    10
    """
    return ResNet((2, 2, 2, 2), classes=classes, in_channels=in_channels, width=width, stem=stem)


def resnet34(*, classes: int = 1000, in_channels: int = 3, width: int = 64, stem: str = "imagenet") -> ResNet:
    """ResNet-34, 21.80 million parameters with 1000 classes.

    >>> len(resnet34(width=4).blocks())
    18
    """
    return ResNet((3, 4, 6, 3), classes=classes, in_channels=in_channels, width=width, stem=stem)


def resnet50(*, classes: int = 1000, in_channels: int = 3, width: int = 64, stem: str = "imagenet") -> ResNet:
    """ResNet-50, 25.56 million parameters with 1000 classes; the stride sits on the 3x3 convolution.

    >>> len(resnet50(width=4).blocks())
    18
    """
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes, in_channels=in_channels, width=width, stem=stem)
