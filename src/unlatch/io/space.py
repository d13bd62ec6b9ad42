"""Is there room? Asked before a long run, since a disk that is full at its end costs all of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["shortage"]


def shortage(folder: str | Path, needed: int, what: str) -> str | None:
    """What to tell the user if `needed` more bytes do not fit into a folder; `None` if they do.

    **Arguments:** `folder`: need not exist yet; `what`: the thing that takes the room, such as `"one checkpoint"`.

    >>> shortage(".", 0, "nothing")
    >>> "no room for one checkpoint of 1,000.0 PB" in shortage(".", 10**18, "one checkpoint")
    True
    """
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    # File systems that make room for files as they come count none.
    if free >= needed and (found.f_files == 0 or found.f_favail > 0):
        return None
    left = f"{_size(free)} are free" if free < needed else "no further file can be made"
    return f"{folder}: no room for {what} of {_size(needed)}, {left} there: delete something or choose another folder"


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} PB"
