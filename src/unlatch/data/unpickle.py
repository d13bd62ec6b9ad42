"""Reading pickled arrays without running what a pickle may ask for.

A pickle is a program. This reader knows three of the functions that pickled NumPy arrays call and answers each with a
stand-in of its own; every other name is refused, so nothing that a file says is imported or executed.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError

__all__ = ["PickledArray", "skim", "unpickle"]

#: Runs of bytes from this length on stay in the file. Frames, which hold everything else, are far shorter.
_LONG = 1 << 20

_DTYPES = {"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"}
_NUMPY_CORES = ("numpy.core", "numpy._core")


def _text(value: object) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else str(value)


class _Dtype:
    """Stands for `numpy.dtype`: numbers only."""

    __slots__ = ("code",)

    def __init__(self, name: object, *_: object) -> None:
        self.code = _text(name)
        if self.code not in _DTYPES:
            raise pickle.UnpicklingError(f"array elements of type {self.code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if _text(state[1]) == ">":
            self.code = ">" + self.code


class PickledArray:
    """An array of numbers found in a pickle, in `value`; empty if the pickle never says what is in it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: NDArray[Any] = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.fill(raw, dtype, shape, "F" if fortran else "C")

    def fill(self, raw: object, dtype: object, shape: tuple[int, ...], order: object) -> None:
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes | bytearray):
            raise pickle.UnpicklingError("an array without plain content")
        kind = np.dtype(dtype.code)
        expected = math.prod(shape) * kind.itemsize
        if len(raw) != expected:
            raise pickle.UnpicklingError(f"an array of shape {shape} with {len(raw)} bytes instead of {expected}")
        layout = np.frombuffer(raw, kind)
        self.value = layout.reshape(shape, order="F") if _text(order) == "F" else layout.reshape(shape)


class _Function:
    """Stands for a function or class that the pickle names; cannot be altered by the pickle."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> object:
        if self.name == "dtype":
            return _Dtype(*args)
        if self.name == "_reconstruct":
            return PickledArray()
        if self.name == "_frombuffer":
            array = PickledArray()
            array.fill(*args)
            return array
        if self.name == "encode" and len(args) == 2 and _text(args[1]) in ("latin1", "latin-1"):
            return str(args[0]).encode("latin-1")
        raise pickle.UnpicklingError(f"a call of {self.name!r}")

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError(f"a change of {self.name!r}")


_ADMITTED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    *((f"{core}.multiarray", "_reconstruct") for core in _NUMPY_CORES),
    *((f"{core}.numeric", "_frombuffer") for core in _NUMPY_CORES),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return _Function(name)


def unpickle(raw: bytes, where: str) -> Any:
    """Containers, numbers, bytes and arrays from a pickle; anything else is refused.

    **Arguments:**

    - `raw`: the pickle, as written by Python 2 or 3.
    - `where`: name of the file, for the error text.

    **Returns:** the object, with a `PickledArray` in the place of each array; Python 2 strings come as bytes.

    >>> unpickle(pickle.dumps({"data": np.arange(3)}), "example")["data"].value
    array([0, 1, 2])
    """
    return _load(io.BytesIO(raw), where, len(raw))


def _load(file: Any, where: str, size: int) -> Any:
    try:
        return _Reader(file, encoding="bytes").load()
    except Exception as error:
        # A damaged pickle can fail in any way at all; all of them mean the same to the user.
        raise DataError(
            f"{where} is not a pickle of plain arrays ({size} bytes): it holds or asks for {error}. "
            "It was refused without running anything; fetch it again from its origin."
        ) from error


class _Skimming:
    """A file whose long runs of bytes are stepped over; their places are noted instead."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.places: dict[int, list[int]] = {}

    def read(self, count: int) -> bytes:
        return bytes(self._step_over(count)) if count >= _LONG else self._file.read(count)

    def readinto(self, buffer: memoryview) -> int:
        if len(buffer) >= _LONG:
            return self._step_over(len(buffer))
        part = self._file.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def readline(self) -> bytes:
        return self._file.readline()

    def _step_over(self, count: int) -> int:
        begin = self._file.tell()
        if begin + count > self._size:
            raise pickle.UnpicklingError(f"{count} bytes from {begin} on, where the file ends at {self._size}")
        self.places.setdefault(count, []).append(begin)
        self._file.seek(count, io.SEEK_CUR)
        return count


def skim(path: Path) -> tuple[Any, Callable[[PickledArray], int]]:
    """The same of a file whose arrays are too large for memory: long ones are not read, and only their shape is known.

    **Returns:** the object, and a function that tells where in the file the elements of one of its arrays begin.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            skimming = _Skimming(file, size)
            content = _load(skimming, str(path), size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error

    def begin(array: PickledArray) -> int:
        places = skimming.places.get(array.value.nbytes, [])
        if array.value.nbytes < _LONG:
            raw, found = path.read_bytes(), array.value.tobytes()
            places = [raw.find(found)] if raw.count(found) == 1 else []
        if len(places) != 1 or (array.value.ndim > 1 and not array.value.flags.c_contiguous):
            raise DataError(
                f"{path} holds an array of shape {array.value.shape} that is not stored once, row by row and as it is: "
                "load it with pickle where you trust it, and write it again with protocol 4"
            )
        return places[0]

    return content, begin
