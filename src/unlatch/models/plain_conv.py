"""A chain of 3x3 convolutions without batch norm or shortcuts, so that both gradients of a layer need no graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError
from .base import Chain
from .residual import PoolHead

__all__ = ["PlainConv"]


class PlainConv(Chain):
    """Convolutions with bias and ReLU, then pooling and a linear layer. Blocks: `layers.0` ... `layers.{n-1}`, `head`.

    Every layer is one linear map and an elementwise function: the network whose input gradients `layerpipe` can share
    between devices. Where the width grows, the map is halved, by a stride instead of a pooling.

    **Arguments:**

    - `widths`: channels of each convolution.
    - `classes`, `in_channels`: of the data.

    >>> import torch
    >>> model = PlainConv((8, 16), in_channels=1)
    >>> model(torch.zeros(2, 1, 8, 8)).shape, len(model.blocks())
    (torch.Size([2, 10]), 3)
    """

    def __init__(
        self, widths: Sequence[int] = (16, 16, 32, 32, 64, 64), *, classes: int = 10, in_channels: int = 3
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ConfigError(f"widths {tuple(widths)} do not make a network: expected one or more, each > 0")
        self.layers = nn.Sequential()
        inputs = in_channels
        for index, width in enumerate(widths):
            conv = nn.Conv2d(inputs, width, 3, stride=2 if index and width > inputs else 1, padding=1)
            # Without norms the variance must be kept by the weights.
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
            self.layers.append(nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU())))
            inputs = width
        self.head = PoolHead(inputs, classes)

    def blocks(self) -> list[nn.Module]:
        return [*self.layers, self.head]
