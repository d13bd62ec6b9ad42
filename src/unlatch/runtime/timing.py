"""Events of a device that runs ahead: known when they begin, timed when the device has come so far."""

from __future__ import annotations

from collections import deque
from typing import Any

from ..nn.device import Mark
from .events import Event, Recorder

__all__ = ["Timing"]


class Timing:
    """Holds events back until their times are known, so that nobody has to wait for the device meanwhile.

    Start and end of an event are a `Mark` until then. Events come into the recorder in their order.

    **Arguments:** `recorder`: takes the events with their times.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: deque[tuple[Event, Mark, Mark]] = deque()

    def add(self, event: Event) -> None:
        """Take an event whose start and end are marks, and pass on those that are over."""
        start: Any = event.start
        end: Any = event.end
        self._open.append((event, start, end))
        while self._open[0][2].reached:
            self._close()
            if not self._open:
                return

    def settle(self) -> None:
        """Wait for the device and pass on everything."""
        while self._open:
            self._close()

    def _close(self) -> None:
        event, start, end = self._open.popleft()
        self._recorder.add(event._replace(start=float(start), end=float(end)))
