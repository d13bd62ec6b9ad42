"""VGG with batch norm (VGG-11, VGG-16): a plain chain of 3x3 convolutions, nothing skipped."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ..errors import ConfigError
from .base import Chain
from .residual import PoolHead, conv_norm_relu, init_convs

__all__ = ["VGG"]

# Width of each convolution; a tuple ends with a max pooling.
_GROUPS: dict[int, tuple[tuple[int, ...], ...]] = {
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    16: ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}


class VGG(Chain):
    """Convolution units, five of them ending with max pooling, and a head.

    Blocks: `features.0` ... `features.{n-1}` (convolution, norm, ReLU, perhaps pooling), `head`. Convolutions have no
    bias, since a norm follows. Pooling rounds up, so images smaller than 32x32 work as well.

    **Arguments:**

    - `depth`: 11 or 16.
    - `classes`, `in_channels`: of the data.
    - `head`: `"small"` (pooling, one linear layer) or `"imagenet"` (7x7 map, three linear layers of width 4096).
    - `dropout`: in the `"imagenet"` head.

    >>> import torch
    >>> model = VGG(11)
    >>> model(torch.zeros(2, 3, 32, 32)).shape, len(model.blocks())
    (torch.Size([2, 10]), 9)
    """

    def __init__(
        self, depth: int = 16, *, classes: int = 10, in_channels: int = 3, head: str = "small", dropout: float = 0.5
    ) -> None:
        super().__init__()
        if depth not in _GROUPS:
            raise ConfigError(f"no VGG of depth {depth}: expected one of {', '.join(map(str, _GROUPS))}")
        units: list[nn.Sequential] = []
        inputs = in_channels
        for widths in _GROUPS[depth]:
            for width in widths:
                units.append(conv_norm_relu(inputs, width))
                inputs = width
            units[-1].add_module("pool", nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*units)
        self.head = _head(head, classes, dropout)
        init_convs(self)

    def blocks(self) -> list[nn.Module]:
        return [*self.features, self.head]


def _head(kind: str, classes: int, dropout: float) -> nn.Module:
    if kind == "small":
        return PoolHead(512, classes)
    if kind != "imagenet":
        raise ConfigError(f"unknown head {kind!r}: expected 'small' (one linear layer) or 'imagenet' (three)")
    return nn.Sequential(
        OrderedDict(
            pool=nn.AdaptiveAvgPool2d(7),
            flatten=nn.Flatten(),
            linear1=nn.Linear(512 * 7 * 7, 4096),
            relu1=nn.ReLU(inplace=True),
            dropout1=nn.Dropout(dropout),
            linear2=nn.Linear(4096, 4096),
            relu2=nn.ReLU(inplace=True),
            dropout2=nn.Dropout(dropout),
            linear3=nn.Linear(4096, classes),
        )
    )
