"""Digits, Fashion-MNIST, Shakespeare, and data of one's own."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unlatch import data, models
from unlatch.data import Loader, TensorData
from unlatch.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
IMAGES = {"train": RNG.integers(0, 256, (7, 5, 4), np.uint8), "t10k": RNG.integers(0, 256, (3, 5, 4), np.uint8)}
LABELS = {"train": np.arange(7, dtype=np.uint8), "t10k": np.arange(3, dtype=np.uint8)}


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_fashion(folder: Path, packed: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part in IMAGES:
        for kind, array in (("images-idx3", IMAGES[part]), ("labels-idx1", LABELS[part])):
            name, raw = f"{part}-{kind}-ubyte", idx(array)
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(raw) if packed else raw)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw", "."])
def test_fashion_mnist_from_idx_files(folder: str, packed: bool, tmp_path: Path) -> None:
    write_fashion(tmp_path / folder, packed)
    for part, name in zip(data.load("fashion-mnist", tmp_path), IMAGES, strict=True):
        assert torch.equal(part.x[:, 0], torch.from_numpy(IMAGES[name]))
        assert part.sample_shape == (1, 5, 4)
        assert part.y.tolist() == LABELS[name].tolist()
        assert (part.y.dtype, part.classes) == (torch.int64, 10)


def test_fashion_mnist_missing_or_incomplete(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fashion-mnist was not found in .*train-images-idx3-ubyte.*zalandoresearch"):
        data.load("fashion-mnist", tmp_path)
    write_fashion(tmp_path / "fashion-mnist", True)
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match="is incomplete: missing t10k-labels-idx1-ubyte "):
        data.load("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "raw", "text"),
    [
        ("train-images-idx3-ubyte", idx(IMAGES["train"])[:-1], "expected 156 bytes, got 155"),
        ("train-images-idx3-ubyte", idx(IMAGES["train"]) + b"x", "expected 156 bytes, got 157"),
        ("train-images-idx3-ubyte", b"\x00\x00", "not an idx file"),
        ("train-images-idx3-ubyte", idx(LABELS["train"]), "not an idx file of bytes with 3 dimensions"),
        ("train-labels-idx1-ubyte", idx(LABELS["t10k"]), "has 7 images but .* has 3 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([1, 2, 10], np.uint8)), "labels up to 10, expected 0 to 9"),
    ],
)
def test_damaged_idx_file(name: str, raw: bytes, text: str, tmp_path: Path) -> None:
    write_fashion(tmp_path, False)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=text) as error:
        data.load("fashion-mnist", tmp_path)
    assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("cut", [slice(0, -9), slice(0, 5), slice(1, None)])
def test_damaged_gzip_file(cut: slice, tmp_path: Path) -> None:
    write_fashion(tmp_path, True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[cut])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is truncated or damaged"):
        data.load("fashion-mnist", tmp_path)


def test_digits_are_split_once_and_for_all() -> None:
    train, test = data.load("digits")
    assert (len(train), len(test)) == (1437, 360)
    assert train.x.dtype == torch.float32
    assert abs(train.x.mean()) < 1e-4
    assert train.x.std().item() == pytest.approx(1, abs=1e-4)
    counts = torch.stack([train.y.bincount(), test.y.bincount()])
    assert ((counts[1] - counts.sum(0) / 5).abs() <= 1).all()
    again = data.load("digits")
    assert torch.equal(again[0].x, train.x)
    assert torch.equal(again[1].y, test.y)
    assert not torch.equal(data.load("digits", seed=1)[1].y, test.y)


def test_no_digit_is_in_both_parts() -> None:
    train, test = data.load("digits")
    rows = {tuple(x.flatten().tolist()) for x in train.x}
    assert len(rows) == len(train)
    assert not any(tuple(x.flatten().tolist()) in rows for x in test.x)


def test_digits_can_be_enlarged() -> None:
    (small, small_test), (large, large_test) = data.load("digits"), data.load("digits", size=24)
    assert large.sample_shape == (1, 24, 24)
    assert torch.equal(small.y, large.y)
    assert torch.equal(small_test.y, large_test.y)
    # The same pictures: the mean of nine pixels is near the one they came from.
    back = torch.nn.functional.avg_pool2d(large.x, 3)
    assert torch.corrcoef(torch.stack([back.flatten(), small.x.flatten()]))[0, 1] > 0.95
    assert large.augment is not None
    assert large.augment.pad == 3
    for size in (0, 12, 8.0, True):
        with pytest.raises(ConfigError, match=r"'digits': size is 8 or a multiple of it, got"):
            data.load("digits", size=size)


def test_border_of_shifted_digits_is_background() -> None:
    train, _ = data.load("digits")
    assert train.augment is not None
    assert train.augment.fill == pytest.approx(train.x.min().item())


def test_digits_can_be_learned() -> None:
    train, test = data.load("digits")
    model = models.build("mlp", **models.options_for("mlp", train.sample_shape, train.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = Loader(train, 64, shuffle=True)
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert (model(test.x).argmax(1) == test.y).double().mean() > 0.9


TEXT = "to be or not to be, that is the question:\n" * 5


def test_shakespeare_predicts_the_next_character(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text(TEXT)
    train, test = data.load("shakespeare", tmp_path, context=8, test_fraction=0.2)
    letters = sorted(set(TEXT))
    assert train.classes == test.classes == len(letters)
    cut = len(TEXT) - int(0.2 * len(TEXT))
    for part, text in ((train, TEXT[:cut]), (test, TEXT[cut:])):
        assert len(part) == (len(text) - 1) // 8
        assert part.sample_shape == (8,)
        for i in range(len(part)):
            assert "".join(letters[t] for t in part.x[i]) == text[8 * i : 8 * i + 8]
            assert "".join(letters[t] for t in part.y[i]) == text[8 * i + 1 : 8 * i + 9]


def test_overlapping_windows_and_loader(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(TEXT)
    train, _ = data.load("shakespeare", tmp_path, context=8, stride=3)
    assert torch.equal(train.x[1], torch.cat([train.x[0, 3:], train.x[2, 2:5]]))
    for x, y in Loader(train, 5, shuffle=True):
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert x.is_contiguous()
    assert len(train.subset(4)) == 4


def test_shakespeare_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"shakespeare was not found in .* expected tinyshakespeare\.txt"):
        data.load("shakespeare", tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_text(TEXT[:30])
    with pytest.raises(DataError, match="has 30 characters: too short for windows of 128"):
        data.load("shakespeare", tmp_path)
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"tinyshakespeare\.txt is not text in UTF-8"):
        data.load("shakespeare", tmp_path)
    with pytest.raises(ConfigError, match="context 0"):
        data.load("shakespeare", tmp_path, context=0)


def test_unknown_names_and_options_get_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar-10'\. Did you mean 'cifar10'\? Known: digits, "):
        data.load("cifar-10")
    with pytest.raises(ConfigError, match=r"data set 'digits': .*'sead'\. Did you mean 'seed'\? Its options: seed"):
        data.load("digits", sead=1)


def test_subsets_of_both_parts() -> None:
    train, test = data.load("digits", train_size=100, test_size=50, subset_seed=3)
    assert (len(train), len(test)) == (100, 50)
    assert torch.equal(train.x, data.load("digits")[0].subset(100, 3).x)
    assert (train.y.bincount() - 10).abs().max() <= 1


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_data_for_test.py").write_text(
        "import torch\n"
        "from unlatch.data import TensorData\n"
        "def pairs(count=4):\n    part = torch.ones(count, 2), torch.arange(count) % 3\n    return part, part\n"
        "def ready(data_dir):\n    part = TensorData(torch.zeros(2, 1), torch.zeros(2), classes=int(data_dir))\n"
        "    return part, part\n"
        "def regression():\n    part = torch.zeros(2, 1), torch.zeros(2)\n    return part, part\n"
        "def nothing():\n    return None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own_module")
def test_data_of_ones_own() -> None:
    train, test = data.load("own_data_for_test:pairs", count=5)
    assert isinstance(train, TensorData)
    assert (len(train), len(test), train.classes) == (5, 5, 3)
    assert data.load("own_data_for_test:ready", "7")[0].classes == 7


@pytest.mark.usefixtures("own_module")
def test_data_of_ones_own_that_cannot_be_used() -> None:
    with pytest.raises(DataError, match="returned NoneType: expected a pair"):
        data.load("own_data_for_test:nothing")
    with pytest.raises(DataError, match="a training part of type tuple: expected a TensorData"):
        data.load("own_data_for_test:regression")
    with pytest.raises(ConfigError, match="no function 'pair' in it"):
        data.load("own_data_for_test:pair")
