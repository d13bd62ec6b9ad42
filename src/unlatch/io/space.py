"""Is there room? Asked before a long run, since a disk that is full at its end costs all of it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["bytes_text", "shortage"]


def shortage(folder: str | Path, needed: int, what: str) -> str | None:
    """What to tell the user if `needed` more bytes do not fit into a folder; `None` if they do.

    **Arguments:** `folder`: need not exist yet; `what`: the thing that takes the room, such as `"one checkpoint"`.

    >>> shortage(".", 0, "nothing")
    >>> "no room for one checkpoint of 1000000000.0 GB" in shortage(".", 10**18, "one checkpoint")
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
    left = f"{bytes_text(free)} are free" if free < needed else "no further file can be made"
    return (
        f"{folder}: no room for {what} of {bytes_text(needed)}, {left} there: delete something or choose another folder"
    )


def bytes_text(count: float) -> str:
    """Bytes in the unit that suits.

    >>> [bytes_text(n) for n in (0, 900, 3_211_648, 5e9)]
    ['0 B', '900 B', '3.2 MB', '5.0 GB']
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
