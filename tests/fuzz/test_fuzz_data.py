"""Data files that were cut off, damaged, or are something else: a `DataError` that names the file."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import tarfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fuzzing import cases, damaged, outcome, scalars, values
from unlatch import data
from unlatch.data.cifar import CIFAR10, CIFAR100, CifarFormat, read_cifar
from unlatch.data.fashion_mnist import fashion_mnist, read_idx
from unlatch.data.shakespeare import shakespeare
from unlatch.data.tensors import TensorData
from unlatch.data.unpickle import unpickle
from unlatch.errors import DataError, UnlatchError

IMAGES = 3


def tiny(form: CifarFormat) -> CifarFormat:
    """The same format with three images per file."""
    return replace(form, train={next(iter(form.train)): IMAGES}, test={next(iter(form.test)): IMAGES})


def checked(found: Any) -> None:
    if isinstance(found, UnlatchError):
        assert isinstance(found, DataError)
        return
    for part in found:
        assert isinstance(part, TensorData)
        assert int(part.y.min()) >= 0
        assert int(part.y.max()) < part.classes


@pytest.mark.parametrize("form", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_binary_cifar(tmp_path, form):
    small, raw = tiny(form), bytes([1]) * IMAGES * (3072 + form.label_bytes)
    folder = tmp_path / form.binary[0]
    folder.mkdir()
    names = [f"{name}.bin" for name in (*small.train, *small.test)]

    @cases(80, share=0.2)
    @given(damaged(raw), st.sampled_from(names))
    def check(content: bytes, victim: str) -> None:
        for name in names:
            (folder / name).write_bytes(content if name == victim else raw)
        checked(outcome(read_cifar, small, tmp_path))

    check()


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, raw in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))
    return buffer.getvalue()


def test_cifar_in_an_archive(tmp_path):
    small = tiny(CIFAR10)
    # Noise does not pack, so that damage hits the content and not only the frame.
    noise = random.Random(0).randbytes(IMAGES * 3073)
    packed = archive({f"x/{name}.bin": noise for name in (*small.train, *small.test)})

    @cases(80, share=0.2)
    @given(damaged(packed, most=4))
    @example(b"")
    @example(gzip.compress(b"no archive"))
    def check(raw: bytes) -> None:
        (tmp_path / small.binary[1]).write_bytes(raw)
        checked(outcome(read_cifar, small, tmp_path))

    check()


PICKLES = [
    pickle.dumps({b"data": np.zeros((IMAGES, 3072), np.uint8), b"labels": [1, 2, 3]}, protocol) for protocol in (2, 4)
]


@cases(250)
@given(st.sampled_from(PICKLES).flatmap(lambda raw: damaged(raw, most=5)))
@example(pickle.dumps({b"data": np.zeros((0,), np.uint8), b"labels": []}))
@example(pickle.dumps({b"data": np.zeros((IMAGES, 3072), np.uint8), b"labels": [10**30] * 3}))
@example(pickle.dumps({b"data": np.zeros((IMAGES, 3072), np.uint8), b"labels": [True] * 3}))
@example(pickle.dumps({"labels": [1], b"labels": 7}))
def test_pickled_cifar(tmp_path, raw):
    small = tiny(CIFAR10)
    folder = tmp_path / small.pickled[0]
    folder.mkdir(exist_ok=True)
    for name in (*small.train, *small.test):
        (folder / name).write_bytes(raw)
    checked(outcome(read_cifar, small, tmp_path))


@cases(200)
@given(st.one_of(st.binary(max_size=60), values.map(pickle.dumps)))
def test_pickles_of_anything(raw):
    outcome(unpickle, raw, "a file")


def idx(shape: tuple[int, ...]) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    return bytes([0, 0, 8, len(shape)]) + sizes + bytes(int(np.prod(shape)))


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path, packed):
    path = tmp_path / ("images.gz" if packed else "images")
    sound = gzip.compress(idx((2, 5, 5))) if packed else idx((2, 5, 5))

    @cases(200, share=0.5)
    @given(damaged(sound))
    @example(b"")
    @example(idx((0, 0, 0)))
    @example(bytes([0, 0, 8, 3]) + b"\xff" * 12)
    def check(raw: bytes) -> None:
        path.write_bytes(raw)
        found = outcome(read_idx, path, 3)
        assert isinstance(found, DataError) or found.dim() == 3

    check()


def test_fashion_mnist_of_odd_shapes(tmp_path):
    """Labels and images that are each sound, but do not belong together, or are none."""
    for images, labels in (((0, 28, 28), (0,)), ((2, 3, 7), (2,)), ((2, 28, 28), (3,)), ((2, 0, 0), (2,))):
        for part in ("train", "t10k"):
            (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
            (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
        checked(outcome(fashion_mnist, tmp_path))


@cases(150)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass"))))
@example(b"ab" * 500)
def test_texts(tmp_path, raw):
    (tmp_path / "tinyshakespeare.txt").write_bytes(raw)
    checked(outcome(shakespeare, tmp_path, context=8))


@cases(150)
@given(st.sampled_from(data.names()), st.dictionaries(st.sampled_from(["seed", "context", "stride", "x"]), scalars))
@example("digits", {"seed": -1})
@example("digits", {"seed": 10**30})
@example("shakespeare", {"context": "8"})
@example("shakespeare", {"context": 10**30})
@example("shakespeare", {"test_fraction": float("nan")})
def test_options_of_data_sets(tmp_path, name, options):
    (tmp_path / "tinyshakespeare.txt").write_bytes(b"to be or not to be " * 50)
    outcome(data.load, name, tmp_path, **options)
