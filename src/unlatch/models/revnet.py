"""Reversible residual networks: RevNet-18, 34 and 50 as in PETRA, the small ones for CIFAR, and one of fixed width.

One block is one coupling, half a block of the original RevNet, so that each can be a stage of its own. Blocks that
change the shape are not reversible; `irevnet` has a network without any.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..errors import ConfigError
from ..nn.coupling import Coupling
from . import revnet_blocks as parts
from .base import Chain

__all__ = ["RevNet", "revnet18", "revnet34", "revnet50", "revnet_cifar", "revnet_fixed"]


class RevNet(Chain):
    """A stem, groups of couplings, a head that joins both streams.

    Blocks: `stem`, `layer1.0`, `layer1.1`, ..., `head`. Not reversible are the stem, the head, and the first block of
    each group that changes the shape: all groups but the first, and with bottlenecks the first as well.

    **Arguments:**

    - `counts`: blocks in each group; from one group to the next the size halves and the width doubles.
    - `bottleneck`: branches of three convolutions with four times the width outside, instead of two 3x3.
    - `width`: channels of one stream in the first group.
    - `classes`, `in_channels`: of the data.
    - `stem`: `"imagenet"` (a quarter of the size), `"half"` (half of it) or `"small"` (full size).
    - `zero_init`: branches return zero at first.

    >>> import torch
    >>> model = RevNet((2, 2), width=4, stem="small", classes=10)
    >>> model(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    >>> len(model.blocks())
    6
    """

    def __init__(
        self,
        counts: Sequence[int],
        *,
        bottleneck: bool = False,
        width: int = 64,
        classes: int = 1000,
        in_channels: int = 3,
        stem: str = "imagenet",
        zero_init: bool = False,
    ) -> None:
        super().__init__()
        self.stem = parts.stem(stem, in_channels, width)
        channels = width
        for index, count in enumerate(counts):
            if count < 1:
                raise ConfigError(f"each group needs a block, got {count} in group {index + 1} of {tuple(counts)}")
            group, channels = _group(count, channels, width << index, 2 if index else 1, bottleneck, zero_init)
            self.add_module(f"layer{index + 1}", group)
        self._groups = len(counts)
        self.head = parts.head(channels, classes)

    def blocks(self) -> list[nn.Module]:
        layers = [self.get_submodule(f"layer{index + 1}") for index in range(self._groups)]
        return [self.stem, *(block for layer in layers for block in layer.children()), self.head]


def _group(
    count: int, inputs: int, width: int, stride: int, bottleneck: bool, zero_init: bool
) -> tuple[nn.Sequential, int]:
    """The blocks of a group and the channels of its streams."""
    outputs = parts.EXPANSION * width if bottleneck else width
    blocks: list[nn.Module] = []
    if stride > 1 or inputs != outputs:
        down = parts.BottleneckDown if bottleneck else parts.BasicDown
        blocks.append(down(inputs, width, stride=stride, zero_init=zero_init))
    branch = parts.bottleneck_branch if bottleneck else parts.basic_branch
    while len(blocks) < count:
        blocks.append(Coupling(branch(width, zero_init=zero_init)))
    return nn.Sequential(*blocks), outputs


def revnet18(*, classes: int = 1000, in_channels: int = 3, stem: str = "imagenet", zero_init: bool = False) -> RevNet:
    """RevNet-18: 10 blocks, 12.2 million parameters for ImageNet.

    >>> round(sum(p.numel() for p in revnet18().parameters()) / 1000)
    12216
    """
    return RevNet((2, 2, 2, 2), classes=classes, in_channels=in_channels, stem=stem, zero_init=zero_init)


def revnet34(*, classes: int = 1000, in_channels: int = 3, stem: str = "imagenet", zero_init: bool = False) -> RevNet:
    """RevNet-34: 18 blocks, 22.3 million parameters for ImageNet."""
    return RevNet((3, 4, 6, 3), classes=classes, in_channels=in_channels, stem=stem, zero_init=zero_init)


def revnet50(*, classes: int = 1000, in_channels: int = 3, stem: str = "imagenet", zero_init: bool = False) -> RevNet:
    """RevNet-50: 18 blocks, bottlenecks, 30.4 million parameters for ImageNet."""
    return RevNet(
        (3, 4, 6, 3), bottleneck=True, classes=classes, in_channels=in_channels, stem=stem, zero_init=zero_init
    )


def revnet_cifar(
    depth: int = 20,
    *,
    classes: int = 10,
    in_channels: int = 3,
    width: int = 16,
    stem_stride: int = 1,
    zero_init: bool = False,
) -> RevNet:
    """The reversible form of the ResNets for small images: three groups, depth 6n+2. Any size from 4x4 on works.

    With `stem_stride=2` the first convolution halves the images, which makes everything after it four times cheaper.

    >>> model = revnet_cifar(8, in_channels=1)
    >>> len(model.blocks())
    5
    """
    n, rest = divmod(depth - 2, 6)
    if rest or n < 1:
        raise ConfigError(f"depth {depth} is not 6n+2: expected 8, 14, 20, 26, 32, ... for a CIFAR RevNet")
    if stem_stride not in (1, 2):
        raise ConfigError(f"stem_stride must be 1 (full size) or 2 (half of it), got {stem_stride!r}")
    stem = "half" if stem_stride == 2 else "small"
    return RevNet((n, n, n), width=width, classes=classes, in_channels=in_channels, stem=stem, zero_init=zero_init)


def revnet_fixed(
    depth: int = 8, *, classes: int = 10, in_channels: int = 3, width: int = 32, zero_init: bool = False
) -> RevNet:
    """`depth` equal couplings between stem and head: no block in between changes the shape, all are reversible.

    >>> len(revnet_fixed(5).blocks())
    7
    """
    return RevNet((depth,), width=width, classes=classes, in_channels=in_channels, stem="small", zero_init=zero_init)
