"""What must be done before this process ends: open runs take leave of the other ranks.

Threads that are still inside of the communication library when the interpreter goes away abort the process, and the
others are left to guess what became of it. So a program that does not close its runs has them closed at its end.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol

__all__ = ["end_all", "ended", "opened"]


class Open(Protocol):
    """Something that must not stay open."""

    def end(self, error: BaseException | None) -> None:
        """Close, within a bounded time. **Arguments:** `error`: what ends the program before its time, if anything."""


# By process: one that was forked off has a copy of what is open, and none of the connections is its own.
_open: dict[tuple[int, int], Open] = {}


def opened(what: Open) -> None:
    """Have `what` closed at the end of the program unless it was `ended` before."""
    _open[os.getpid(), id(what)] = what


def ended(what: Open) -> None:
    """Nothing is left to close."""
    _open.pop((os.getpid(), id(what)), None)


def end_all(error: BaseException | None = None) -> None:
    """Close what is open, the newest first."""
    for process, number in reversed(list(_open)):
        what = _open.pop((process, number))
        if process == os.getpid():
            what.end(error)


@atexit.register
def _at_exit() -> None:
    end_all(getattr(sys, "last_value", None))
