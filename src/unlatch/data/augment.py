"""Crop, flip and normalise a whole batch of images at once, without a loop over samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError

__all__ = ["Augment", "Box", "ResizedCrop", "normalise"]

#: Left, top, right and bottom in pixels.
Box = tuple[float, float, float, float]


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


@dataclass(frozen=True)
class ResizedCrop:
    """A random part of an image in a file, of random area and shape, scaled to the size of all; perhaps mirrored.

    What is drawn does not depend on the sizes of images, so that each has its own draws whatever stands beside it.

    **Arguments:**

    - `least`: of the area of an image, the least share that is shown.
    - `stretch`: how many times wider than high, or higher than wide, a part may be.
    - `flip`: whether half of the images are mirrored left to right.

    >>> crop = ResizedCrop()
    >>> drawn = crop.draw(1, torch.Generator().manual_seed(0))
    >>> [round(edge) for edge in crop.chosen(drawn[0])(640, 480)]
    [18, 14, 456, 390]
    """

    least: float = 0.08
    stretch: float = 4 / 3
    flip: bool = True

    #: Parts that are tried before the whole centre is taken, and numbers that each takes.
    _TRIES, _NUMBERS = 10, 4

    def __post_init__(self) -> None:
        if not 0.0 < self.least <= 1.0 or self.stretch < 1.0:
            raise ConfigError(
                f"crop with least {self.least} and stretch {self.stretch}: expected a share up to 1, and 1 or more"
            )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers from 0 to 1 for so many images."""
        return torch.rand(count, self._TRIES * self._NUMBERS + 1, generator=generator)

    def mirrored(self, drawn: Tensor) -> Tensor:
        """Which of the images are."""
        return drawn[:, -1] < (0.5 if self.flip else 0.0)

    def chosen(self, drawn: Tensor) -> Callable[[int, int], Box]:
        """The part of an image that one row of `draw` chooses, by its width and height."""
        tries = drawn[:-1].view(self._TRIES, self._NUMBERS).tolist()

        def box(width: int, height: int) -> Box:
            for area, shape, across, down in tries:
                pixels = width * height * (self.least + (1.0 - self.least) * area)
                ratio = math.exp((2.0 * shape - 1.0) * math.log(self.stretch))
                wide, high = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
                if wide <= width and high <= height:
                    left, top = across * (width - wide), down * (height - high)
                    return left, top, left + wide, top + high
            wide, high = min(width, height * self.stretch), min(height, width * self.stretch)
            left, top = (width - wide) / 2, (height - high) / 2
            return left, top, left + wide, top + high

        return box


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
