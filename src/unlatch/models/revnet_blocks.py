"""The parts of reversible residual networks: branches of couplings, stems, down-sampling blocks, head.

All widths of a ResNet are doubled and split into two streams of the original width; a branch reads one stream, so its
parameter count is the ResNet's. Convolutions carry a bias and torch's default initialisation, the last ReLU is inside
the branch, and nothing follows the addition, or it could not be undone.
"""

from __future__ import annotations

from collections import OrderedDict

import torch.nn.functional as F
from torch import nn

from ..errors import ConfigError
from ..nn.branch import as_stream
from ..nn.coupling import Streams
from ..nn.permutation import Merge, Split
from .residual import PoolHead

__all__ = ["BasicDown", "BottleneckDown", "basic_branch", "bottleneck_branch", "head", "stem"]

EXPANSION = 4


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2)


def _norm(width: int, zero_init: bool) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width)
    if zero_init:
        nn.init.zeros_(norm.weight)
    return norm


def basic_branch(width: int, middle: int | None = None, *, zero_init: bool = False) -> nn.Sequential:
    """3x3 convolution, norm, ReLU, twice.

    **Arguments:**

    - `width`: channels of a stream.
    - `middle`: channels between the convolutions, by default `width`.
    - `zero_init`: start with a branch that returns zero.

    >>> import torch
    >>> basic_branch(4)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 4, 6, 6])
    """
    middle = middle or width
    return nn.Sequential(
        OrderedDict(
            conv1=_conv(width, middle, 3),
            norm1=nn.BatchNorm2d(middle),
            relu1=nn.ReLU(inplace=True),
            conv2=_conv(middle, width, 3),
            norm2=_norm(width, zero_init),
            relu2=nn.ReLU(inplace=True),
        )
    )


def bottleneck_branch(
    width: int, *, inputs: int | None = None, stride: int = 1, zero_init: bool = False
) -> nn.Sequential:
    """1x1 convolution to `width` channels, 3x3 (carries the stride), 1x1 to `4 width`; norm and ReLU after each.

    >>> import torch
    >>> bottleneck_branch(2)(torch.zeros(1, 8, 6, 6)).shape
    torch.Size([1, 8, 6, 6])
    """
    outputs = EXPANSION * width
    return nn.Sequential(
        OrderedDict(
            conv1=_conv(inputs or outputs, width, 1),
            norm1=nn.BatchNorm2d(width),
            relu1=nn.ReLU(inplace=True),
            conv2=_conv(width, width, 3, stride),
            norm2=nn.BatchNorm2d(width),
            relu2=nn.ReLU(inplace=True),
            conv3=_conv(width, outputs, 1),
            norm3=_norm(outputs, zero_init),
            relu3=nn.ReLU(inplace=True),
        )
    )


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(OrderedDict(conv=_conv(inputs, outputs, 1, stride), norm=nn.BatchNorm2d(outputs)))


class BasicDown(nn.Module):
    """Half the size, more channels; not reversible: `y = f(x) + shortcut(x~)`, `y~` is what f has after its first ReLU.

    >>> import torch
    >>> y, carried = BasicDown(4, 8)((torch.zeros(1, 4, 6, 6), torch.zeros(1, 4, 6, 6)))
    >>> y.shape, carried.shape
    (torch.Size([1, 8, 3, 3]), torch.Size([1, 8, 3, 3]))
    """

    def __init__(self, inputs: int, width: int, *, stride: int = 2, zero_init: bool = False) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, width, 3, stride)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.norm2 = _norm(width, zero_init)
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, state: Streams) -> Streams:
        x, carried = state
        h = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(h)), inplace=True)
        return as_stream(y) + as_stream(self.shortcut(carried)), as_stream(h)


class BottleneckDown(nn.Module):
    """More channels and, with `stride` 2, half the size; not reversible: `y = f(x) + shortcut(x~)`, `y~ = shortcut(x)`.

    >>> import torch
    >>> y, carried = BottleneckDown(4, 2)((torch.zeros(1, 4, 6, 6), torch.zeros(1, 4, 6, 6)))
    >>> y.shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, inputs: int, width: int, *, stride: int = 2, zero_init: bool = False) -> None:
        super().__init__()
        self.f = bottleneck_branch(width, inputs=inputs, stride=stride, zero_init=zero_init)
        self.shortcut = _shortcut(inputs, EXPANSION * width, stride)
        self.carried_shortcut = _shortcut(inputs, EXPANSION * width, stride)

    def forward(self, state: Streams) -> Streams:
        x, carried = state
        return as_stream(self.f(x)) + as_stream(self.carried_shortcut(carried)), as_stream(self.shortcut(x))


def stem(kind: str, in_channels: int, width: int) -> nn.Sequential:
    """Images to two streams of `width` channels.

    **Arguments:**

    - `kind`: `"imagenet"` (7x7 of stride 2 and 2x2 pooling: a quarter of the size), `"half"` (3x3 of stride 2), or
      `"small"` (3x3, full size).

    >>> import torch
    >>> stem("imagenet", 3, 8)(torch.zeros(1, 3, 64, 64))[0].shape
    torch.Size([1, 8, 16, 16])
    """
    shapes = {"imagenet": (7, 2), "half": (3, 2), "small": (3, 1)}
    if kind not in shapes:
        raise ConfigError(
            f"unknown stem {kind!r}: expected 'imagenet' (a quarter of the size), 'half' (half) or 'small' (full size)"
        )
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv=_conv(in_channels, 2 * width, *shapes[kind]),
        norm=nn.BatchNorm2d(2 * width),
        relu=nn.ReLU(inplace=True),
    )
    if kind == "imagenet":
        parts["pool"] = nn.MaxPool2d(2)
    parts["split"] = Split()
    return nn.Sequential(parts)


def head(width: int, classes: int) -> nn.Sequential:
    """Both streams of `width` channels, side by side, pooled, to logits.

    >>> import torch
    >>> head(4, 10)((torch.zeros(2, 4, 3, 3), torch.zeros(2, 4, 3, 3))).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(OrderedDict(merge=Merge(), pool=PoolHead(2 * width, classes)))
