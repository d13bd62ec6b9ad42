"""Batches as a pure function of (seed, epoch, batch index), whatever else draws random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointMismatch, ConfigError
from .augment import Augment, ResizedCrop, normalise
from .tensors import TensorData

__all__ = ["Loader"]


class Loader:
    """Iterate over batches `(x, y)`; each full pass moves on to the next epoch, with a new order if shuffled.

    **Arguments:**

    - `data`: the samples.
    - `batch_size`: samples per batch; the last one may be shorter.
    - `shuffle`: whether each epoch has its own random order.
    - `seed`: of order and augmentation.
    - `augment`: `True` for the data set's own augmentation, or an `Augment`, or of images in files a `ResizedCrop`.
    - `drop_last`: leave out a last batch that is not full.
    - `channels_last`: memory format of image batches.
    - `pin_memory`: whether batches lie in memory that an accelerator copies from by itself.

    >>> data = TensorData(torch.arange(5.0).reshape(5, 1), torch.arange(5), classes=5)
    >>> [y.tolist() for x, y in Loader(data, batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        data: TensorData,
        batch_size: int = 128,
        shuffle: bool = False,
        seed: int = 0,
        augment: bool | Augment | ResizedCrop = False,
        drop_last: bool = False,
        channels_last: bool = False,
        pin_memory: bool = False,
    ) -> None:
        if batch_size < 1 or (drop_last and batch_size > len(data)):
            raise ConfigError(f"batch size {batch_size} gives no batch: expected 1 to {len(data)} samples")
        self.data = data
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.augment = _chosen(augment, data)
        self.drop_last = drop_last
        self.channels_last = channels_last
        self.pin_memory = pin_memory
        self.epoch = 0
        self._next = 0  # batches already handed out in this epoch
        self._resume_at = 0
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(len(self.data), self.batch_size)
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self._resume_at = self._resume_at, 0
        return self._batches(self.epoch, start)

    def _batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, len(self)):
            batch = self.batch(epoch, index)
            self.epoch, self._next = epoch, index + 1
            yield batch
        self.epoch, self._next = epoch + 1, 0

    def batch(self, epoch: int, index: int) -> tuple[Tensor, Tensor]:
        """One batch, whatever the position of the iteration.

        >>> data = TensorData(torch.arange(5.0).reshape(5, 1), torch.arange(5), classes=5)
        >>> Loader(data, batch_size=2).batch(epoch=3, index=1)[1]
        tensor([2, 3])
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of an epoch with {len(self)} batches")
        chosen = self._epoch_order(epoch)[index * self.batch_size :][: self.batch_size]
        generator = self._generator(epoch, index + 1) if self.augment is not None else None
        x, y = self.data.read(chosen, self.augment, generator)
        if x.dtype == torch.uint8:
            x = normalise(x, self.data.mean, self.data.std)
        if self.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return (x.pin_memory(), y.pin_memory()) if self.pin_memory else (x, y)

    def _epoch_order(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            count = len(self.data)
            order = torch.randperm(count, generator=self._generator(epoch, 0)) if self.shuffle else torch.arange(count)
            self._order = epoch, order
        return self._order[1]

    def _generator(self, epoch: int, stream: int) -> torch.Generator:
        mixed = np.random.SeedSequence([self.seed % 2**64, epoch, stream]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(mixed))

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at this epoch; a position loaded for the same epoch is kept."""
        if epoch != self.epoch:
            self.epoch, self._next, self._resume_at = epoch, 0, 0

    def seek(self, epoch: int, samples: int) -> None:
        """Start the next iteration at this epoch, after so many samples of it.

        >>> data = TensorData(torch.arange(5.0).reshape(5, 1), torch.arange(5), classes=5)
        >>> loader = Loader(data, batch_size=2)
        >>> loader.seek(epoch=1, samples=2)
        >>> [y.tolist() for x, y in loader]
        [[2, 3], [4]]
        """
        batch, surplus = divmod(samples, self.batch_size)
        if samples == len(self.data):
            batch, surplus = len(self), 0
        if surplus or batch > len(self):
            raise ConfigError(
                f"no batch of {self.batch_size} begins after {samples} samples of epoch {epoch + 1}: continue with the "
                "batch size and data of the run that was stopped there"
            )
        self.epoch = epoch
        self._next = self._resume_at = batch

    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "samples": len(self.data),
            "batch_size": self.batch_size,
            "shuffle": int(self.shuffle),
            "drop_last": int(self.drop_last),
        }

    def state_dict(self) -> dict[str, int]:
        """Position after the last batch handed out, as plain numbers."""
        done = self._next == len(self)
        return {"epoch": self.epoch + done, "batch": 0 if done else self._next, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the loader must be set up alike.

        >>> data = TensorData(torch.arange(5.0).reshape(5, 1), torch.arange(5), classes=5)
        >>> first, second = Loader(data, 2), Loader(data, 2)
        >>> _ = next(iter(first))
        >>> second.load_state_dict(first.state_dict())
        >>> [y.tolist() for x, y in second]
        [[2, 3], [4]]
        """
        differing = [key for key, value in self._identity().items() if state.get(key) != value]
        if differing:
            came = ", ".join(f"{key}={state.get(key)}" for key in differing)
            expected = ", ".join(f"{key}={self._identity()[key]}" for key in differing)
            raise CheckpointMismatch(f"the saved position is of a loader with {came}, this one has {expected}")
        self.epoch = int(state["epoch"])
        self._next = self._resume_at = int(state["batch"])


def _chosen(augment: bool | Augment | ResizedCrop, data: TensorData) -> Augment | ResizedCrop | None:
    if augment is False:
        return None
    found = data.augment if augment is True else augment
    if found is None:
        raise ConfigError("this data set has no augmentation of its own: set augment to False or give an Augment")
    if len(data.x.shape) != 4:
        raise ConfigError(f"only images (N, C, H, W) can be augmented, the data are of shape {tuple(data.x.shape)}")
    return found
