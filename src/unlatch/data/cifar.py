"""CIFAR-10 and CIFAR-100: the binary or the pickled version, unpacked or in the archive they are distributed in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .augment import Augment
from .files import Member, check_size, data_folder, missing, read_members
from .tensors import TensorData
from .unpickle import PickledArray, unpickle

__all__ = ["CIFAR10", "CIFAR100", "CifarFormat", "cifar10", "cifar100", "read_cifar"]

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarFormat:
    """What the files of one CIFAR set are called and hold.

    **Arguments:**

    - `train`, `test`: number of images in each file, by name (without `.bin`).
    - `label_bytes`: labels in front of each image in the binary version; the last one counts.
    - `label_key`: name of the labels in the pickled version.
    """

    name: str
    classes: int
    train: dict[str, int]
    test: dict[str, int]
    binary: tuple[str, str]
    pickled: tuple[str, str]
    label_bytes: int
    label_key: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


CIFAR10 = CifarFormat(
    name="cifar10",
    classes=10,
    train={f"data_batch_{i}": 10_000 for i in range(1, 6)},
    test={"test_batch": 10_000},
    binary=("cifar-10-batches-bin", "cifar-10-binary.tar.gz"),
    pickled=("cifar-10-batches-py", "cifar-10-python.tar.gz"),
    label_bytes=1,
    label_key="labels",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2023, 0.1994, 0.2010),
)
CIFAR100 = CifarFormat(
    name="cifar100",
    classes=100,
    train={"train": 50_000},
    test={"test": 10_000},
    binary=("cifar-100-binary", "cifar-100-binary.tar.gz"),
    pickled=("cifar-100-python", "cifar-100-python.tar.gz"),
    label_bytes=2,
    label_key="fine_labels",
    mean=(0.507, 0.487, 0.441),
    std=(0.267, 0.256, 0.276),
)


def cifar10(data_dir: str | Path | None = None) -> tuple[TensorData, TensorData]:
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels, 10 classes."""
    return read_cifar(CIFAR10, data_dir)


def cifar100(data_dir: str | Path | None = None) -> tuple[TensorData, TensorData]:
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels, 100 (fine) classes."""
    return read_cifar(CIFAR100, data_dir)


def read_cifar(form: CifarFormat, data_dir: str | Path | None = None) -> tuple[TensorData, TensorData]:
    """Training and test part of the set, from the first of its versions that the folder holds."""
    counts = {**form.train, **form.test}
    wanted = (
        f"one of {form.binary[0]}/ (with {', '.join(f'{name}.bin' for name in counts)}), {form.pickled[0]}/ "
        f"(with {', '.join(counts)}), {form.binary[1]}, {form.pickled[1]}"
    )
    root = data_folder(data_dir, wanted)
    content = read_members(root, *form.binary, [f"{name}.bin" for name in counts])
    if content is not None:
        parts = {name: _from_binary(form, content[f"{name}.bin"], count) for name, count in counts.items()}
    else:
        content = read_members(root, *form.pickled, list(counts))
        if content is None:
            raise missing(form.name, root, wanted, "https://www.cs.toronto.edu/~kriz/cifar.html")
        parts = {name: _from_pickle(form, content[name], count) for name, count in counts.items()}
    return _join(form, [parts[name] for name in form.train]), _join(form, [parts[name] for name in form.test])


def _from_binary(form: CifarFormat, file: Member, count: int) -> tuple[Tensor, Tensor]:
    record = form.label_bytes + _PIXELS
    check_size(file.where, count * record, len(file.raw))
    rows = np.frombuffer(file.raw, np.uint8).reshape(count, record)
    labels = rows[:, form.label_bytes - 1].astype(np.int64)
    _check_labels(form, file.where, labels.tolist(), count)
    return torch.from_numpy(rows[:, form.label_bytes :].copy()), torch.from_numpy(labels)


def _from_pickle(form: CifarFormat, file: Member, count: int) -> tuple[Tensor, Tensor]:
    content = unpickle(file.raw, file.where)
    if not isinstance(content, dict):
        raise DataError(f"{file.where} holds a {type(content).__name__}: expected a dictionary with 'data' and labels")
    data, labels = (content.get(key.encode(), content.get(key)) for key in ("data", form.label_key))
    if not isinstance(data, PickledArray) or data.value.dtype != np.uint8:
        raise DataError(f"{file.where} holds no array of bytes under 'data'; it has {sorted(map(str, content))}")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataError(
            f"{file.where} holds no list of numbers under {form.label_key!r}; it has {sorted(map(str, content))}"
        )
    check_size(f"'data' in {file.where}", count * _PIXELS, data.value.size)
    _check_labels(form, file.where, labels, count)
    return torch.from_numpy(data.value.reshape(count, _PIXELS).copy()), torch.tensor(labels)


def _check_labels(form: CifarFormat, where: str, labels: list[int], count: int) -> None:
    if len(labels) != count:
        raise DataError(f"{where} is truncated or damaged: expected {count} labels, got {len(labels)}")
    if min(labels) < 0 or max(labels) >= form.classes:
        raise DataError(
            f"{where} is damaged: labels from {min(labels)} to {max(labels)}, expected 0 to {form.classes - 1}"
        )


def _join(form: CifarFormat, parts: list[tuple[Tensor, Tensor]]) -> TensorData:
    images = torch.cat([images for images, _ in parts]).view(-1, 3, 32, 32)
    labels = torch.cat([labels for _, labels in parts])
    return TensorData(images, labels, form.classes, form.mean, form.std, Augment(pad=4, flip=True))
