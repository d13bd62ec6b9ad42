"""The parts that residual networks share: two kinds of blocks, three kinds of shortcuts, a pooled linear head.

ReLU works in place only on a tensor that the same block has just made (a norm's output or a sum), never on its input.
It saves an allocation per ReLU, which a CPU feels.
"""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError
from ..nn.apply import Apply
from ..nn.parts import Divisible

__all__ = ["BasicBlock", "Bottleneck", "PadShortcut", "PoolHead", "conv", "conv_norm_relu", "init_convs"]


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the map's size at stride 1; no bias, for a norm follows."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def conv_norm_relu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU, under the names `conv`, `norm`, `relu`."""
    return nn.Sequential(
        OrderedDict(
            conv=conv(inputs, outputs, kernel, stride), norm=nn.BatchNorm2d(outputs), relu=nn.ReLU(inplace=True)
        )
    )


class PadShortcut(nn.Module):
    """A shortcut without parameters: average pooling down to the new map size, zeros for the new channels.

    >>> import torch
    >>> PadShortcut(2, 3, stride=2)(torch.ones(1, 2, 4, 4)).sum((0, 2, 3))
    tensor([4., 4., 0.])
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.extra = outputs - inputs
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            # Odd maps: a strided convolution rounds the size up, so pooling must as well.
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return F.pad(x, (0, 0, 0, 0, 0, self.extra))


def _shortcut(kind: str, inputs: int, outputs: int, stride: int) -> nn.Module:
    if kind not in ("conv", "pad"):
        raise ConfigError(
            f"unknown shortcut {kind!r}: expected 'conv' (1x1 convolution) or 'pad' (zeros, no parameters)"
        )
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(inputs, outputs, stride)
    return nn.Sequential(OrderedDict(conv=conv(inputs, outputs, 1, stride), norm=nn.BatchNorm2d(outputs)))


def _open(x: Tensor, conv: nn.Module, norm: nn.Module, shortcut: nn.Module) -> tuple[Tensor, Tensor]:
    """A residual block up to its first inner activation, and its skip.

    The skip has been through the shortcut: where that shrinks the map, less has to cross a cut.
    """
    return F.relu(norm(conv(x)), inplace=True), shortcut(x)


def _go_on(state: tuple[Tensor, Tensor], conv: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    h, skip = state
    return F.relu(norm(conv(h)), inplace=True), skip


def _close(state: tuple[Tensor, Tensor], conv: nn.Module, norm: nn.Module) -> Tensor:
    h, skip = state
    return F.relu(norm(conv(h)) + skip, inplace=True)


class BasicBlock(Divisible):
    """Two 3x3 convolutions and a shortcut.

    >>> import torch
    >>> BasicBlock(4, 8, stride=2)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, inputs: int, width: int, stride: int = 1, shortcut: str = "conv") -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(shortcut, inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return _close(_open(x, self.conv1, self.norm1, self.shortcut), self.conv2, self.norm2)

    def parts(self) -> list[nn.Module]:
        """The convolutions one by one."""
        return [Apply(_open, self.conv1, self.norm1, self.shortcut), Apply(_close, self.conv2, self.norm2)]


class Bottleneck(Divisible):
    """1x1, 3x3 (carries the stride), 1x1 to four times the width, and a shortcut.

    >>> import torch
    >>> Bottleneck(8, 4)(torch.zeros(1, 8, 6, 6)).shape
    torch.Size([1, 16, 6, 6])
    """

    def __init__(self, inputs: int, width: int, stride: int = 1, shortcut: str = "conv") -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 1)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, 4 * width, 1)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut = _shortcut(shortcut, inputs, 4 * width, stride)

    def forward(self, x: Tensor) -> Tensor:
        state = _open(x, self.conv1, self.norm1, self.shortcut)
        return _close(_go_on(state, self.conv2, self.norm2), self.conv3, self.norm3)

    def parts(self) -> list[nn.Module]:
        """The convolutions one by one."""
        first = Apply(_open, self.conv1, self.norm1, self.shortcut)
        return [first, Apply(_go_on, self.conv2, self.norm2), Apply(_close, self.conv3, self.norm3)]


class PoolHead(nn.Module):
    """Mean over the map, then a linear layer: images of any size."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def init_convs(model: nn.Module) -> None:
    """He initialisation by fan-out of all convolutions; batch norms keep torch's ones and zeros."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
