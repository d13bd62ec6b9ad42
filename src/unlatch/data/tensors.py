"""A data set: samples as one tensor in memory, or as images that stay in their files, and a tensor of targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from .augment import Augment, ResizedCrop
from .stored import Stored

__all__ = ["TensorData", "stratified"]


@dataclass(frozen=True, eq=False)
class TensorData:
    """Samples, their targets, and how they are meant to be used.

    **Arguments:**

    - `x`: samples; `uint8` images `(N, C, H, W)` are normalised when loaded, other types are used as they are.
      A `Stored` reads them from files when a batch asks for them.
    - `y`: one class per sample `(N,)`, or one per position `(N, T)`.
    - `classes`: number of different targets.
    - `mean`, `std`: per channel, for images scaled to 0..1.
    - `augment`: what a `Loader` does to training images when asked to augment.

    >>> data = TensorData(torch.zeros(6, 1, 2, 2), torch.tensor([0, 1, 0, 1, 0, 1]), classes=2)
    >>> len(data), data.sample_shape, data.subset(4).y.bincount()
    (6, (1, 2, 2), tensor([2, 2]))
    """

    x: Tensor | Stored
    y: Tensor
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: Augment | ResizedCrop | None = None

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or not len(self.x):
            raise DataError(f"{len(self.x)} samples with {len(self.y)} targets: expected as many, and at least one")
        channels = self.x.shape[1] if len(self.x.shape) > 1 else 1
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, 1, channels):
            raise DataError(f"{len(self.mean)} means and {len(self.std)} deviations for {channels} channels")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample, without the batch."""
        return tuple(self.x.shape[1:])

    def take(self, index: Tensor) -> TensorData:
        """The samples with these indices."""
        x = self.x.take(index) if isinstance(self.x, Stored) else self.x.index_select(0, index)
        return replace(self, x=x, y=self.y.index_select(0, index))

    def read(
        self, index: Tensor, augment: Augment | ResizedCrop | None = None, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """The samples with these indices as tensors, images augmented if asked for, and their targets.

        >>> data = TensorData(torch.arange(3.0).reshape(3, 1), torch.arange(3), classes=3)
        >>> data.read(torch.tensor([2, 0]))
        (tensor([[2.],
                [0.]]), tensor([2, 0]))
        """
        y = self.y.index_select(0, index)
        if isinstance(self.x, Stored):
            return self.x.read(index, augment, generator), y
        x = self.x.index_select(0, index)
        if augment is None or generator is None:
            return x, y
        if isinstance(augment, ResizedCrop):
            raise ConfigError("a ResizedCrop shows parts of images in files; these are in memory: give an Augment")
        return augment(x, generator), y

    def subset(self, count: int, seed: int = 0) -> TensorData:
        """`count` samples in their original order, each class with its share; the same for the same seed."""
        return self.take(stratified(self.y, count, seed))

    def hold_out(self, count: int, seed: int = 0) -> tuple[TensorData, TensorData]:
        """All samples but `count`, and these: with classes a stratified draw, of a text the windows at its end.

        Nothing of what is held out stays in the rest: windows that overlap with it are left out of both.

        >>> data = TensorData(torch.arange(6.0).reshape(6, 1), torch.tensor([0, 1, 0, 1, 0, 1]), classes=2)
        >>> rest, held = data.hold_out(2)
        >>> len(rest), held.y.bincount(), set(rest.x.flatten().tolist()) & set(held.x.flatten().tolist())
        (4, tensor([1, 1]), set())
        """
        shared = 0 if self.y.dim() == 1 or isinstance(self.x, Stored) else _windows_before(self.x)
        if not 0 < count < len(self) - shared:
            raise DataError(f"{count} samples to hold out: expected 1 to {len(self) - shared - 1} of {len(self)}")
        if self.y.dim() > 1:
            order = torch.arange(len(self))
            return self.take(order[: len(self) - count - shared]), self.take(order[-count:])
        held = torch.zeros(len(self), dtype=torch.bool)
        held[stratified(self.y, count, seed)] = True
        return self.take((~held).nonzero().squeeze(1)), self.take(held.nonzero().squeeze(1))


def _windows_before(x: Tensor) -> int:
    """How many windows before one have positions in common with it, or with its target, which is one position on."""
    # Windows are views into one text (`unfold`), so that their distance in memory is that in the text.
    return x.shape[1] // x.stride(0) if x.dim() == 2 else 0


def stratified(y: Tensor, count: int, seed: int) -> Tensor:
    """Sorted indices of `count` random samples in which every class has its share, to within one sample.

    Targets with more than one dimension have no class of their own; samples are then drawn evenly.

    >>> y = torch.tensor([0] * 8 + [1] * 4)
    >>> y[stratified(y, 6, seed=0)]
    tensor([0, 0, 0, 0, 1, 1])
    """
    if not 0 < count <= len(y):
        raise DataError(f"a subset of {count} samples was asked for: expected 1 to {len(y)}")
    generator = torch.Generator().manual_seed(seed)
    label = y if y.dim() == 1 else torch.zeros(len(y), dtype=torch.long)
    exact = label.bincount().double() * count / len(y)
    quota = exact.floor().long()
    # The classes that lost most by rounding down share what is left; random order, so that ties favour no class.
    order = torch.randperm(len(quota), generator=generator)
    quota[order[(quota - exact)[order].argsort(stable=True)[: count - int(quota.sum())]]] += 1
    shuffled = torch.randperm(len(y), generator=generator)
    return torch.cat([shuffled[label[shuffled] == k][:n] for k, n in enumerate(quota.tolist())]).sort().values
