"""A request to stop as a file in the run's folder, for runs in the background: `touch runs/dtr-1/stop`.

Only the rank that reads the data looks for it: it stops feeding, and all others follow as at the end of the data.
Signals are the `Trainer`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["heeding_stop_file", "stop_file"]


def stop_file(folder: str | Path) -> Path:
    """The file whose existence asks the run in `folder` to stop."""
    return Path(folder) / "stop"


@contextmanager
def heeding_stop_file(folder: str | Path) -> Iterator[None]:
    """Around a run: a file that was there before is no request to it, and one that was heeded is none to the next."""
    stop_file(folder).unlink(missing_ok=True)
    try:
        yield
    finally:
        stop_file(folder).unlink(missing_ok=True)
