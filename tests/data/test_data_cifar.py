"""CIFAR in each of its four packings gives the same tensors; what is damaged or hostile is refused by name."""

from __future__ import annotations

import pickle
import struct
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from unlatch import data
from unlatch.data.cifar import CIFAR10, CIFAR100, CifarFormat, read_cifar
from unlatch.data.unpickle import unpickle
from unlatch.errors import DataError

TINY10 = replace(CIFAR10, train=dict.fromkeys(CIFAR10.train, 4), test={"test_batch": 3})
TINY100 = replace(CIFAR100, train={"train": 6}, test={"test": 3})
FORMATS = {"cifar10": TINY10, "cifar100": TINY100}


def content(form: CifarFormat) -> dict[str, tuple[np.ndarray, list[int]]]:
    rng = np.random.default_rng(0)
    counts = {**form.train, **form.test}
    return {
        name: (rng.integers(0, 256, (n, 3072), np.uint8), rng.integers(0, form.classes, n).tolist())
        for name, n in counts.items()
    }


def write_binary(form: CifarFormat, root: Path) -> None:
    folder = root / form.binary[0]
    folder.mkdir()
    for name, (pixels, labels) in content(form).items():
        columns = [np.array(labels, np.uint8)[:, None], pixels]
        if form.label_bytes == 2:
            columns.insert(0, np.full((len(labels), 1), 99, np.uint8))
        (folder / f"{name}.bin").write_bytes(np.concatenate(columns, 1).tobytes())


def python2_pickle(form: CifarFormat, pixels: np.ndarray, labels: list[int]) -> bytes:
    """The very opcodes that Python 2's cPickle wrote for the distributed files (protocol 2, byte strings)."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = (
        b"cnumpy\ndtype\n("
        + string(b"u1")
        + b"K\x00K\x01tR(K\x03"
        + string(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + string(b"b") + b"\x87R"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    array = empty + b"(K\x01" + shape + dtype + b"\x89" + string(pixels.tobytes()) + b"tb"
    values = b"](" + b"".join(map(number, labels)) + b"e"
    items = string(b"data") + array + string(form.label_key.encode()) + values + string(b"batch_label") + string(b"x")
    return b"\x80\x02}(" + items + b"u."


def write_python2(form: CifarFormat, root: Path) -> None:
    folder = root / form.pickled[0]
    folder.mkdir()
    for name, (pixels, labels) in content(form).items():
        (folder / name).write_bytes(python2_pickle(form, pixels, labels))


def write_python3(protocol: int) -> Callable[[CifarFormat, Path], None]:
    def write(form: CifarFormat, root: Path) -> None:
        folder = root / form.pickled[0]
        folder.mkdir()
        for name, (pixels, labels) in content(form).items():
            (folder / name).write_bytes(pickle.dumps({"data": pixels, form.label_key: labels}, protocol))

    return write


def packed(write: Callable[[CifarFormat, Path], None], packing: str) -> Callable[[CifarFormat, Path], None]:
    def write_archive(form: CifarFormat, root: Path) -> None:
        build = root / "build"
        build.mkdir()
        write(form, build)
        folder, archive = getattr(form, packing)
        with tarfile.open(root / archive, "w:gz") as tar:
            tar.add(build / folder, folder)

    return write_archive


VERSIONS = {
    "binary": write_binary,
    "binary archive": packed(write_binary, "binary"),
    "python 2": write_python2,
    "python 2 archive": packed(write_python2, "pickled"),
    **{f"python 3, protocol {p}": write_python3(p) for p in (2, 3, 4, 5)},
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_version_gives_the_same_data(name: str, version: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    VERSIONS[version](form, tmp_path)
    for part, files in zip(read_cifar(form, tmp_path), (form.train, form.test), strict=True):
        expected = [content(form)[file] for file in files]
        pixels = np.concatenate([p for p, _ in expected]).reshape(-1, 3, 32, 32)
        assert torch.equal(part.x, torch.from_numpy(pixels))
        assert part.x.dtype == torch.uint8
        assert part.x.is_contiguous()
        assert part.y.tolist() == [label for _, labels in expected for label in labels]
        assert part.y.dtype == torch.int64
        assert part.classes == form.classes
        assert len(part.mean) == len(part.std) == 3


def test_distributed_sizes_are_the_expected_ones() -> None:
    assert sum(CIFAR10.train.values()) == sum(CIFAR100.train.values()) == 50_000
    assert sum(CIFAR10.test.values()) == sum(CIFAR100.test.values()) == 10_000


def test_the_folder_itself_may_be_given(tmp_path: Path) -> None:
    write_binary(TINY10, tmp_path)
    train, _ = read_cifar(TINY10, tmp_path / "cifar-10-batches-bin")
    assert len(train) == 20


def test_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_binary(TINY10, tmp_path)
    monkeypatch.setenv("UNLATCH_DATA", str(tmp_path))
    assert len(read_cifar(TINY10)[0]) == 20


def test_no_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNLATCH_DATA", raising=False)
    with pytest.raises(
        DataError, match=r"give data_dir or set UNLATCH_DATA .* cifar-10-batches-bin/ \(with data_batch_1"
    ):
        data.load("cifar10")


def test_missing_set_names_folder_files_and_cure(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        data.load("cifar100", tmp_path)
    for part in (str(tmp_path), "cifar-100-binary/", "train.bin", "cifar-100-python.tar.gz", "kriz", "UNLATCH_DATA"):
        assert part in str(error.value)
    with pytest.raises(DataError, match="nowhere does not exist"):
        data.load("cifar100", tmp_path / "nowhere")


def test_incomplete_folder_names_what_is_missing(tmp_path: Path) -> None:
    write_binary(TINY10, tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin is incomplete: .*; missing data_batch_3\.bin$"):
        read_cifar(TINY10, tmp_path)


def test_truncated_binary_names_file_and_sizes(tmp_path: Path) -> None:
    write_binary(TINY10, tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-3073])
    with pytest.raises(DataError, match=r"data_batch_2\.bin is truncated .* expected 12292 bytes, got 9219"):
        read_cifar(TINY10, tmp_path)


def test_label_out_of_range_is_refused(tmp_path: Path) -> None:
    write_binary(TINY10, tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"test_batch\.bin is damaged: labels from \d to 10, expected 0 to 9"):
        read_cifar(TINY10, tmp_path)


@pytest.mark.parametrize("keep", [10, 0.5, 0.99])
def test_truncated_archive(keep: float, tmp_path: Path) -> None:
    packed(write_binary, "binary")(TINY10, tmp_path)
    path = tmp_path / "cifar-10-binary.tar.gz"
    raw = path.read_bytes()
    path.write_bytes(raw[: keep if isinstance(keep, int) else int(keep * len(raw))])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz (is damaged or was not fetched|does not hold)"):
        read_cifar(TINY10, tmp_path)


def test_archive_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("other")
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "other", "other")
    with pytest.raises(DataError, match=r"does not hold data_batch_1\.bin"):
        read_cifar(TINY10, tmp_path)


def replace_batch(root: Path, raw: bytes) -> None:
    write_python2(TINY10, root)
    (root / "cifar-10-batches-py" / "data_batch_1").write_bytes(raw)


@pytest.mark.parametrize("cut", [0, 1, 200, -1])
def test_truncated_pickle(cut: int, tmp_path: Path) -> None:
    pixels, labels = content(TINY10)["data_batch_1"]
    replace_batch(tmp_path, python2_pickle(TINY10, pixels, labels)[:cut])
    with pytest.raises(DataError, match=r"data_batch_1 is not a pickle of plain arrays \(\d+ bytes\)"):
        read_cifar(TINY10, tmp_path)


PIXELS, LABELS = np.zeros((4, 3072), np.uint8), [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2], "holds a list: expected a dictionary"),
        ({"labels": LABELS}, "no array of bytes under 'data'; it has"),
        ({"data": PIXELS.astype(np.float32), "labels": LABELS}, "no array of bytes"),
        ({"data": PIXELS, "labels": ["a"] * 4}, "no list of numbers under 'labels'"),
        ({"data": PIXELS, "labels": LABELS[:3]}, "expected 4 labels, got 3"),
        ({"data": PIXELS, "labels": [0, 1, 2, 10**40]}, "labels from 0 to 1000"),
        ({"data": PIXELS[:3], "labels": LABELS}, "'data' in .* expected 12288 bytes, got 9216"),
    ],
)
def test_pickle_of_something_else(value: object, text: str, tmp_path: Path) -> None:
    replace_batch(tmp_path, pickle.dumps(value))
    with pytest.raises(DataError, match=rf"data_batch_1.*{text}|{text}.*data_batch_1|{text}"):
        read_cifar(TINY10, tmp_path)


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_hostile_pickle_is_refused_and_runs_nothing(protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = {"data": PIXELS, "labels": LABELS, "x": Calls(Path.touch, mark)}
    assert pickle.loads(pickle.dumps(hostile, protocol))
    assert mark.exists()
    mark.unlink()
    replace_batch(tmp_path, pickle.dumps(hostile, protocol))
    with pytest.raises(DataError, match="refused without running anything"):
        read_cifar(TINY10, tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"cnumpy\nfromfile\n(S'x'\ntR.",
        b"cnumpy.core.multiarray\nfrombuffer\n(tR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0edtype.__init__\x93.",  # dotted names reach into admitted ones
        b"cnumpy\nndarray\n(K\x04tR.",  # an array class is named, never called
        b"cnumpy\ndtype\n(S'O'\ntR.",  # elements may be numbers, not objects
        b"cnumpy\ndtype\n(S'O'\nt\x81.",
        b"c_codecs\nencode\n(S'x'\nS'zlib'\ntR.",
        b"cnumpy\ndtype\n(K\x01}tb.",  # a pickle may not change what it names
        b"cnumpy\ndtype\n}S'name'\nS'_reconstruct'\nsb.",
        b"S'id'\nQ.",  # persistent ids
        b"\x82\x01.",  # extension registry
        b"(S'x'\nios\nsystem\n.",
    ],
)
def test_names_other_than_those_of_arrays_are_refused(raw: bytes) -> None:
    with pytest.raises(DataError, match=r"here is not a pickle of plain arrays"):
        unpickle(raw, "here")


@pytest.mark.parametrize("dtype", ["u1", "<i8", ">i4", "f4"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_come_back_as_they_were(dtype: str, order: str, protocol: int) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype, order=order)
    assert np.array_equal(unpickle(pickle.dumps([array], protocol), "here")[0].value, array)


def test_array_with_less_content_than_its_shape() -> None:
    raw = pickle.dumps(np.zeros(3, np.uint8), 2).replace(b"K\x03\x85", b"K\x09\x85")
    with pytest.raises(DataError, match=r"shape \(9,\) with 3 bytes instead of 9"):
        unpickle(raw, "here")
