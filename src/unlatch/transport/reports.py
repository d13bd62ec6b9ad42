"""What a rank tells the launcher that started it while its job runs; without one, nothing is told.

The line to the launcher is one per process, as standard output is: whoever saves or hears signals need not be handed
it through every layer in between.
"""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Any

from .parcel import pack

__all__ = ["open_line", "report", "report_progress"]

_line: Connection | None = None
# A checkpoint may be written by a thread of its own.
_lock = threading.Lock()


def open_line(line: Connection) -> None:
    """From now on, what this process reports goes there."""
    global _line
    _line = line


def report(kind: str, *what: Any) -> None:
    """Tell the launcher, if there is one and it still listens."""
    if _line is not None:
        parcel = pack((kind, *what))
        with _lock, contextlib.suppress(OSError):
            _line.send_bytes(parcel)


def report_progress(step: int) -> None:
    """Say that a checkpoint with everything up to batch `step` is complete: a rank lost from now on loses no more.

    A launcher that restarts ranks takes a failure without anything new between it and the one before as final.
    """
    report("saved", step)
