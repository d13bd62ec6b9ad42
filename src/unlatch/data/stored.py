"""Images that stay in their files: only those of a batch are in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor

from .augment import Augment, ResizedCrop

__all__ = ["Stored"]


class Stored(ABC):
    """What a `TensorData` has in the place of a tensor: `uint8` images of one shape, read when they are asked for.

    **Arguments:**

    - `shape`: of one image, `(C, H, W)`.
    - `index`: which images of the files are the samples, in their order.
    """

    dtype = torch.uint8

    def __init__(self, shape: tuple[int, int, int], index: Tensor) -> None:
        self.shape = (len(index), *shape)
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    @abstractmethod
    def take(self, index: Tensor) -> Self:
        """The samples with these indices; nothing is read."""

    @abstractmethod
    def decode(self, index: Tensor, crop: ResizedCrop | None, generator: torch.Generator | None) -> Tensor:
        """The images with these places in the files, `(N, C, H, W)`; `crop` draws which part of each is shown."""

    def read(
        self, index: Tensor, augment: Augment | ResizedCrop | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """The samples with these indices, augmented if that is asked for."""
        chosen = self.index.index_select(0, index)
        if isinstance(augment, ResizedCrop):
            return self.decode(chosen, augment, generator)
        images = self.decode(chosen, None, None)
        return images if augment is None or generator is None else augment(images, generator)
