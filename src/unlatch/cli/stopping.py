"""Ending a run early and in order.

A request to stop is a file in the run's folder, so that it reaches ranks in other processes, and so that a run in the
background can be stopped by hand (`touch runs/dtr-1/stop`). Only the rank that reads the data looks for it: it stops
feeding, and all others follow as at the end of the data.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from ..data.loader import Loader

__all__ = ["Stoppable", "stop_file", "stopping_on_signals"]


def stop_file(folder: str | Path) -> Path:
    """The file whose existence asks the run in `folder` to stop."""
    return Path(folder) / "stop"


class Stoppable:
    """Batches of a loader until somebody asks to stop."""

    def __init__(self, loader: Loader, stop: Path) -> None:
        self.loader = loader
        self.stopped = False
        self._stop = os.fspath(stop)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        batches = iter(self.loader)
        # Looked for before a batch is taken: the loader's position then says exactly what was fed.
        while not self._asked():
            batch = next(batches, None)
            if batch is None:
                return
            yield batch
        self.stopped = True

    def set_epoch(self, epoch: int) -> None:
        """As the loader's own."""
        self.loader.set_epoch(epoch)

    def _asked(self) -> bool:
        return os.path.exists(self._stop)


@contextmanager
def stopping_on_signals(folder: str | Path) -> Iterator[None]:
    """Inside, the first Ctrl-C (or a request to terminate) asks the run to stop; a second Ctrl-C ends it at once."""
    request = stop_file(folder)
    request.unlink(missing_ok=True)

    def asked(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.exists():
            raise KeyboardInterrupt
        request.touch()
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, _SAID)

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        request.unlink(missing_ok=True)


_SAID = b"\nstopping after the batch under way, then a checkpoint; Ctrl-C again ends at once\n"
