"""Ending a run early and in order.

A request to stop is a file in the run's folder, so that it reaches ranks in other processes, and so that a run in the
background can be stopped by hand (`touch runs/dtr-1/stop`). Only the rank that reads the data looks for it: it stops
feeding, and all others follow as at the end of the data. A file that was there before the run is no request to it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["stop_file", "stopping_on_signals"]


def stop_file(folder: str | Path) -> Path:
    """The file whose existence asks the run in `folder` to stop."""
    return Path(folder) / "stop"


@contextmanager
def stopping_on_signals(folder: str | Path) -> Iterator[None]:
    """Inside, the first Ctrl-C (or a request to terminate) asks the run to stop; a second Ctrl-C ends it at once."""
    request = stop_file(folder)
    request.unlink(missing_ok=True)
    heard: set[int] = set()

    def asked(number: int, frame: FrameType | None) -> None:
        # Not whether the file is there: another rank that got the same Ctrl-C, or the user by hand, may have made it.
        if number == signal.SIGINT and heard:
            raise KeyboardInterrupt
        heard.add(number)
        request.touch()
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _SAID)

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        request.unlink(missing_ok=True)


_SAID = b"\nstopping after the update or evaluation under way, then a checkpoint; Ctrl-C again ends at once\n"
