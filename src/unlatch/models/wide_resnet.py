"""Wide residual networks: few, wide, pre-activated blocks (WRN-28-10)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..nn.apply import Apply
from ..nn.parts import Divisible
from .base import Chain
from .residual import PoolHead, conv, init_convs

__all__ = ["WideBlock", "WideResNet"]


def _open(
    x: Tensor, norm1: nn.Module, conv1: nn.Module, norm2: nn.Module, *shortcut: nn.Module
) -> tuple[Tensor, Tensor]:
    """A wide block up to its inner activation, and its skip."""
    h = F.relu(norm1(x), inplace=True)
    skip = shortcut[0](h) if shortcut else x
    return F.relu(norm2(conv1(h)), inplace=True), skip


def _close(state: tuple[Tensor, Tensor], dropout: nn.Module, conv2: nn.Module) -> Tensor:
    h, skip = state
    out: Tensor = conv2(dropout(h)) + skip
    return out


class WideBlock(Divisible):
    """Norm, ReLU and convolution twice, plus the input; where the shape changes, a 1x1 convolution of the
    activated input instead.

    >>> import torch
    >>> WideBlock(4, 8, stride=2)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, inputs: int, width: int, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, width, 3, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv(width, width, 3)
        self.shortcut = conv(inputs, width, 1, stride) if stride > 1 or inputs != width else None

    def forward(self, x: Tensor) -> Tensor:
        return _close(_open(x, *self._opening()), self.dropout, self.conv2)

    def parts(self) -> list[nn.Module]:
        """The convolutions one by one."""
        return [Apply(_open, *self._opening()), Apply(_close, self.dropout, self.conv2)]

    def _opening(self) -> list[nn.Module]:
        return [self.norm1, self.conv1, self.norm2, *([self.shortcut] if self.shortcut is not None else [])]


class _NormHead(PoolHead):
    """The last activation of a pre-activated network, then the pooled head."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__(inputs, classes)
        self.norm = nn.BatchNorm2d(inputs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu(self.norm(x), inplace=True))


class WideResNet(Chain):
    """Stem, three groups of n wide blocks, normed and pooled linear head.

    Blocks: `stem`, `layer1.0` ... `layer3.{n-1}`, `head`. WRN-28-10 has 36.5 million parameters.

    **Arguments:**

    - `depth`: 6n+4, for example 10, 16, 28, 40.
    - `widen`: the groups have 16, 32 and 64 times this many channels.
    - `classes`, `in_channels`: of the data.
    - `dropout`: between the two convolutions of each block.

    >>> import torch
    >>> WideResNet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self, depth: int = 28, widen: int = 10, *, classes: int = 10, in_channels: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        n, rest = divmod(depth - 4, 6)
        if rest or n < 1:
            raise ConfigError(f"depth {depth} is not 6n+4: expected 10, 16, 22, 28, ... for a wide ResNet")
        self.stem = conv(in_channels, 16, 3)
        self.layer1 = _group(n, 16, 16 * widen, 1, dropout)
        self.layer2 = _group(n, 16 * widen, 32 * widen, 2, dropout)
        self.layer3 = _group(n, 32 * widen, 64 * widen, 2, dropout)
        self.head = _NormHead(64 * widen, classes)
        init_convs(self)

    def blocks(self) -> list[nn.Module]:
        return [self.stem, *self.layer1, *self.layer2, *self.layer3, self.head]


def _group(count: int, inputs: int, width: int, stride: int, dropout: float) -> nn.Sequential:
    first = WideBlock(inputs, width, stride, dropout)
    return nn.Sequential(first, *(WideBlock(width, width, 1, dropout) for _ in range(count - 1)))
