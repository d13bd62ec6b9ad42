"""Images in folders by class, `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`, decoded when a batch asks for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigError, DataError
from ..lookup import import_extra
from .augment import Box, ResizedCrop
from .files import data_folder
from .stored import Stored
from .tensors import TensorData

__all__ = ["imagefolder"]

_ENDINGS = (".jpeg", ".jpg", ".png")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Of the shorter side, the centre that an evaluation shows: 224 of 256 pixels.
_CENTRE = 224 / 256


def imagefolder(data_dir: str | Path | None = None, *, size: int = 224) -> tuple[TensorData, TensorData]:
    """Images in a folder per class, as ImageNet is usually kept; classes are numbered by the order of their names.

    In training a random part of each image is shown, scaled and perhaps mirrored, in evaluation its centre.

    **Arguments:** `size`: pixels a side of what is shown.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"data set 'imagefolder': size is a whole number of pixels of at least 1, got {size!r}")
    import_extra("PIL.Image", "images", "the data set 'imagefolder', which decodes images with Pillow,")
    wanted = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"
    root = data_folder(data_dir, wanted)
    absent = [part for part in ("train", "val") if not (root / part).is_dir()]
    if absent:
        raise DataError(
            f"{root} has no folder {' and no folder '.join(absent)}: expected {wanted} in it, a folder for each class. "
            "Point data_dir or UNLATCH_DATA at the folder that holds train and val."
        )
    classes = _folders(root / "train")
    return _part(root / "train", classes, size), _part(root / "val", classes, size)


def _folders(part: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(part) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataError(
            f"{part} has no folders: expected one for each class, with its images. ImageNet's validation images come "
            "without; sort them into folders of the classes first"
        )
    return names


def _part(part: Path, classes: Sequence[str], size: int) -> TensorData:
    unknown = sorted(set(_folders(part)) - set(classes))
    if unknown:
        raise DataError(
            f"{part / unknown[0]} is a class that is not among the {len(classes)} of train: expected the same folders "
            "in both. Rename it, or add its training images."
        )
    files, labels = list[str](), list[int]()
    for label, name in enumerate(classes):
        folder = part / name
        # A part of a set may lack classes in val; in train every folder is a class and has something to learn from.
        found = _images(folder) if folder.is_dir() else []
        if not found and part.name == "train":
            raise DataError(
                f"{folder} holds no images: expected files that end with {', '.join(_ENDINGS)}. Fetch them again, or "
                "delete the folder, which would be a class of its own."
            )
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(f"{part} holds no images: expected {part.name}/CLASS/ with files ending {', '.join(_ENDINGS)}")
    stored = _Files(part, np.array(files), size, torch.arange(len(files)))
    return TensorData(stored, torch.tensor(labels), len(classes), _MEAN, _STD, ResizedCrop())


def _images(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(_ENDINGS))
    return [f"{folder.name}/{name}" for name in names]


class _Files(Stored):
    """One image per file. Their names are kept as one array, which a million of Python strings would dwarf."""

    def __init__(self, part: Path, names: NDArray[np.str_], size: int, index: Tensor) -> None:
        super().__init__((3, size, size), index)
        self._part, self._names, self._size = part, names, size

    def take(self, index: Tensor) -> Self:
        return type(self)(self._part, self._names, self._size, self.index.index_select(0, index))

    def decode(self, index: Tensor, crop: ResizedCrop | None, generator: torch.Generator | None) -> Tensor:
        images = torch.empty((len(index), 3, self._size, self._size), dtype=torch.uint8)
        drawn = None if crop is None or generator is None else crop.draw(len(index), generator)
        for place, number in enumerate(index.tolist()):
            path = self._part / str(self._names[number])
            box = _centre if crop is None or drawn is None else crop.chosen(drawn[place])
            images[place] = _decoded(path, self._size, box)
        if crop is None or drawn is None:
            return images
        return torch.where(crop.mirrored(drawn).view(-1, 1, 1, 1), images.flip(3), images)


def _centre(width: int, height: int) -> Box:
    side = _CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _decoded(path: Path, size: int, box: Callable[[int, int], Box]) -> Tensor:
    """A part of an image, `box` of its width and height, scaled to a square."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            shown = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box(*image.size))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        have = path.stat().st_size if path.is_file() else None
        what = "is missing" if have is None else f"is no whole image ({have} bytes)"
        raise DataError(
            f"{path} {what}: {error}. Expected a JPEG or PNG image; fetch it again, or delete it and start anew, since "
            "the order of samples depends on which there are."
        ) from error
    return torch.from_numpy(np.array(shown)).permute(2, 0, 1)
