"""How much resident memory a piece of work adds to a process at its worst moment."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["PeakResident"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakResident:
    """The growth of resident memory from the beginning of `measuring` to its peak inside of it.

    What was freed before goes back to the system first, or the work would reuse it unseen. The kernel keeps the peak
    (Linux); where it does not say, `bytes` stays `None`.

    >>> meter = PeakResident()
    >>> with meter.measuring():
    ...     data = bytearray(50_000_000)
    >>> meter.bytes is None or 50_000_000 <= meter.bytes < 60_000_000
    True
    """

    bytes: int | None = None

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Watch the body."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # only glibc can
            ctypes.CDLL(None).malloc_trim(0)
        before = psutil.Process().memory_info().rss
        try:
            _CLEAR.write_text("5")  # the peak counts from now on
        except OSError:
            yield
            return
        yield
        self.bytes = max(0, _peak() - before)


def _peak() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
