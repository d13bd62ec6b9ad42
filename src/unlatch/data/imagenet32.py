"""ImageNet32: the images of ImageNet scaled to 32x32, in ten pickled batches and one for validation.

The pixels stay in the files. A pickle holds them as they are, one image after the other, so they are read from where
they lie; what the pickle says beside them is read by a reader that runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DataError
from .augment import Augment, ResizedCrop
from .files import data_folder, missing
from .stored import Stored
from .tensors import TensorData
from .unpickle import PickledArray, skim

__all__ = ["imagenet32"]

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_CLASSES = 1000
_TRAIN = tuple(f"train_data_batch_{number}" for number in range(1, 11))
_VAL = ("val_data",)
#: As the archives unpack, or all in one folder.
_FOLDERS = ("imagenet32", "Imagenet32_train", "Imagenet32_val", ".")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def imagenet32(data_dir: str | Path | None = None) -> tuple[TensorData, TensorData]:
    """ImageNet32: 1,281,167 training and 50,000 validation images of 32x32 pixels, 1,000 classes; left in its files."""
    wanted = f"{_FOLDERS[0]}/ (or {', '.join(_FOLDERS[1:3])}) with {_TRAIN[0]} to {_TRAIN[-1]}, and {_VAL[0]}"
    root = data_folder(data_dir, wanted)
    found = {name: _find(root, name) for name in _TRAIN + _VAL}
    absent = [name for name, path in found.items() if path is None]
    if len(absent) == len(found):
        raise missing("imagenet32", root, wanted, "https://image-net.org/download-images (downsampled, 32x32)")
    if absent:
        raise DataError(f"imagenet32 in {root} is incomplete: missing {', '.join(absent)}; expected {wanted}")
    return _part([path for name in _TRAIN if (path := found[name])]), _part([path for n in _VAL if (path := found[n])])


def _find(root: Path, name: str) -> Path | None:
    places = (root / folder / name for folder in _FOLDERS)
    return next((path for path in places if path.is_file()), None)


def _part(paths: list[Path]) -> TensorData:
    batches = [_batch(path) for path in paths]
    labels = torch.cat([labels for _, labels in batches])
    pixels = _Rows([rows for rows, _ in batches], torch.arange(len(labels)))
    return TensorData(pixels, labels, _CLASSES, _MEAN, _STD, Augment(pad=4, flip=True))


@dataclass(frozen=True)
class _Batch:
    """Where the pixels of one file begin, and how many images there are."""

    path: Path
    offset: int
    count: int

    def rows(self, index: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Some of the images."""
        try:
            # Opened anew each time, so that a data set can travel to other processes and holds no file open.
            pixels = np.memmap(self.path, np.uint8, "r", self.offset, (self.count, _PIXELS))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.path} cannot be read any more ({error}): it had {self.count} images when the run began. Put it "
                "back and go on from the last checkpoint."
            ) from error
        return np.asarray(pixels[index])


def _batch(path: Path) -> tuple[_Batch, Tensor]:
    content, offset_of = skim(path)
    if not isinstance(content, dict):
        raise DataError(f"{path} holds a {type(content).__name__}: expected a dictionary with 'data' and 'labels'")
    data, labels = (content.get(key.encode(), content.get(key)) for key in ("data", "labels"))
    has = f"it has {', '.join(sorted(str(_plain(key)) for key in content)) or 'nothing'}"
    if not isinstance(data, PickledArray) or data.value.dtype != np.uint8 or data.value.shape[1:] != (_PIXELS,):
        raise DataError(f"{path} holds no array of bytes of shape (images, {_PIXELS}) under 'data'; {has}")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(f"{path} holds no list of whole numbers under 'labels'; {has}")
    count = len(data.value)
    if len(labels) != count or not count:
        raise DataError(f"{path} is damaged: {count} images, {len(labels)} labels; expected as many. Fetch it again")
    if min(labels) < 1 or max(labels) > _CLASSES:
        raise DataError(
            f"{path} is damaged or of another set: labels from {min(labels)} to {max(labels)}, expected 1 to {_CLASSES}"
        )
    return _Batch(path, offset_of(data), count), torch.tensor(labels) - 1


def _plain(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key


class _Rows(Stored):
    """Images of several files, counted through."""

    def __init__(self, batches: list[_Batch], index: Tensor) -> None:
        super().__init__(_SHAPE, index)
        self._batches = batches
        self._ends = np.cumsum([batch.count for batch in batches])

    def take(self, index: Tensor) -> Self:
        return type(self)(self._batches, self.index.index_select(0, index))

    def decode(self, index: Tensor, crop: ResizedCrop | None, generator: torch.Generator | None) -> Tensor:
        asked = index.numpy()
        images = np.empty((len(asked), _PIXELS), np.uint8)
        file_of = np.searchsorted(self._ends, asked, side="right")
        for number in np.unique(file_of):
            here = file_of == number
            batch = self._batches[number]
            images[here] = batch.rows(asked[here] - (self._ends[number] - batch.count))
        return torch.from_numpy(images).view(-1, *_SHAPE)
