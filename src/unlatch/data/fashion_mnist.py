"""Fashion-MNIST, from its idx files, packed with gzip or not."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .augment import Augment
from .files import check_size, data_folder, missing, read_bytes
from .tensors import TensorData

__all__ = ["fashion_mnist", "read_idx"]

_FOLDERS = ("fashion-mnist", "FashionMNIST/raw", ".")
_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_UNSIGNED_BYTES = 8


def fashion_mnist(data_dir: str | Path | None = None) -> tuple[TensorData, TensorData]:
    """Fashion-MNIST: 60,000 training and 10,000 test images of 28x28 grey pixels, 10 classes of clothing."""
    wanted = f"{_FOLDERS[0]}/ with {', '.join(_FILES)}, each perhaps with .gz"
    root = data_folder(data_dir, wanted)
    for folder in (root / name for name in _FOLDERS):
        found = [path for name in _FILES for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        names = {path.name.removesuffix(".gz"): path for path in found}
        if len(names) == len(_FILES):
            return _part(names, "train"), _part(names, "t10k")
        if names:
            absent = [name for name in _FILES if name not in names]
            raise DataError(f"{folder} is incomplete: missing {', '.join(absent)} (or with .gz)")
    raise missing("fashion-mnist", root, wanted, "https://github.com/zalandoresearch/fashion-mnist")


def _part(paths: dict[str, Path], part: str) -> TensorData:
    image_path, label_path = paths[f"{part}-images-idx3-ubyte"], paths[f"{part}-labels-idx1-ubyte"]
    images, labels = read_idx(image_path, dimensions=3), read_idx(label_path, dimensions=1)
    if len(images) != len(labels):
        raise DataError(f"{image_path} has {len(images)} images but {label_path} has {len(labels)} labels")
    if not len(labels) or labels.max() > 9:
        found = f"labels up to {int(labels.max())}" if len(labels) else "no labels"
        raise DataError(f"{label_path} is damaged: {found}, expected 0 to 9")
    return TensorData(images.unsqueeze(1), labels.long(), 10, (0.2860,), (0.3530,), Augment(pad=2, flip=True))


def read_idx(path: Path, dimensions: int) -> Tensor:
    """An idx file of unsigned bytes: magic number, one big-endian size per dimension, then the content.

    **Arguments:**

    - `path`: the file; unpacked if its name ends with `.gz`.
    - `dimensions`: how many the content must have.
    """
    raw = read_bytes(path)
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} is truncated or damaged ({len(raw)} bytes): {error}. Fetch it again.") from error
    header = 4 + 4 * dimensions
    if len(raw) < header or raw[:4] != bytes([0, 0, _UNSIGNED_BYTES, dimensions]):
        raise DataError(f"{path} is not an idx file of bytes with {dimensions} dimensions: it starts with {raw[:4]!r}")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", dimensions, offset=4))
    check_size(str(path), header + math.prod(shape), len(raw))
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).reshape(shape).copy())
