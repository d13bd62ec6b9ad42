"""Finding a data set's files, in a folder or in the archive they came in, and saying clearly what is missing."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..errors import DataError

__all__ = ["Member", "check_size", "data_folder", "missing", "read_bytes", "read_members"]

VARIABLE = "UNLATCH_DATA"


def data_folder(data_dir: str | Path | None, wanted: str) -> Path:
    """The folder given, or the one that `UNLATCH_DATA` names.

    **Arguments:**

    - `data_dir`: the user's choice, if any.
    - `wanted`: what the folder should hold, for the error text.
    """
    chosen = data_dir or os.environ.get(VARIABLE)
    if not chosen:
        raise DataError(f"no data folder: give data_dir or set {VARIABLE} to the folder that holds {wanted}")
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataError(f"the data folder {folder} does not exist; expected a folder that holds {wanted}")
    return folder


def missing(name: str, folder: Path, wanted: str, home: str) -> DataError:
    """The error for a data set that is not there."""
    return DataError(
        f"{name} was not found in {folder}: expected {wanted} there. "
        f"Get it from {home} and put it there, or point data_dir or {VARIABLE} at the folder that holds it."
    )


def read_bytes(path: Path) -> bytes:
    """The file's content, or a `DataError` that names it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


class Member(NamedTuple):
    """Content of one file, and where it was, for error texts."""

    where: str
    raw: bytes


def read_members(root: Path, folder: str, archive: str, names: Sequence[str]) -> dict[str, Member] | None:
    """Content of the named files of one data set.

    **Arguments:**

    - `root`: where to look: `root/folder`, or `root` itself if that is its name, then `root/archive`.
    - `folder`, `archive`: names under which the set is distributed, unpacked and packed.
    - `names`: the files that are needed.

    **Returns:** the files by name; `None` if neither folder nor archive is there.
    """
    place = root if root.name == folder else root / folder
    if place.is_dir():
        absent = [name for name in names if not (place / name).is_file()]
        if absent:
            raise DataError(f"{place} is incomplete: expected {', '.join(names)}; missing {', '.join(absent)}")
        return {name: Member(str(place / name), read_bytes(place / name)) for name in names}
    if (root / archive).is_file():
        return _read_archive(root / archive, names)
    return None


def _read_archive(path: Path, names: Sequence[str]) -> dict[str, Member]:
    found: dict[str, Member] = {}
    try:
        with tarfile.open(path, "r|gz") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                stream = archive.extractfile(member) if name in names and member.isfile() else None
                if stream is not None:
                    found[name] = Member(f"{name} in {path}", stream.read())
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged or was not fetched completely ({path.stat().st_size} bytes): {error}. Fetch it again."
        ) from error
    absent = [name for name in names if name not in found]
    if absent:
        raise DataError(f"{path} does not hold {', '.join(absent)}: expected {', '.join(names)} in it")
    return found


def check_size(where: str, expected: int, got: int) -> None:
    """Refuse content of another size than the format prescribes.

    >>> check_size("test.bin", expected=4, got=4)
    """
    if expected != got:
        raise DataError(f"{where} is truncated or damaged: expected {expected} bytes, got {got}. Fetch it again.")
