"""Crop, flip and normalise a whole batch of images at once, without a loop over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError

__all__ = ["Augment", "normalise"]


@dataclass(frozen=True)
class Augment:
    """Random shift by up to `pad` pixels (pad, then crop back) and random mirroring, drawn for each image.

    **Arguments:**

    - `pad`: border added on each side before a crop of the original size; 0 for no shift.
    - `flip`: whether half of the images are mirrored left to right.
    - `fill`: value of the border, in the units of the stored images.

    >>> batch = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    >>> Augment(pad=1, flip=False)(batch, torch.Generator().manual_seed(0))
    tensor([[[[0, 3, 4],
              [0, 6, 7],
              [0, 0, 0]]]], dtype=torch.uint8)
    """

    pad: int = 4
    flip: bool = True
    fill: float = 0.0

    def __post_init__(self) -> None:
        if self.pad < 0:
            raise ConfigError(f"augmentation with pad {self.pad}: expected 0 or more pixels")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """New images of the same shape and type, from `images` of shape `(N, C, H, W)`."""
        count, channels, height, width = images.shape
        rows = torch.arange(height).expand(count, -1)
        columns = torch.arange(width).expand(count, -1)
        if self.pad:
            images = F.pad(images, (self.pad,) * 4, value=self.fill)
            shift = torch.randint(2 * self.pad + 1, (2, count, 1), generator=generator)
            rows, columns = rows + shift[0], columns + shift[1]
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
            columns = torch.where(mirrored, columns.flip(1), columns)
        pixels = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).view(count, 1, height * width)
        chosen = images.flatten(2).gather(2, pixels.expand(-1, channels, -1))
        return chosen.view(count, channels, height, width)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Bytes `(N, C, ...)` to float32 `(x / 255 - mean) / std` per channel; without a mean only `x / 255`.

    >>> normalise(torch.tensor([[[0, 255]]], dtype=torch.uint8), [0.5], [0.5])
    tensor([[[-1.,  1.]]])
    """
    if not mean:
        return images.float().div_(255)
    shape = (-1,) + (1,) * (images.dim() - 2)
    centre, spread = torch.tensor(mean).view(shape), torch.tensor(std).view(shape)
    return images.float().mul_(1 / (255 * spread)).sub_(centre / spread)
