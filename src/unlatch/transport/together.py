"""What ranks do together nothing can interrupt, so it is done on a thread, and the one who waits can hear an alarm."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from ..errors import TransportError, UnlatchError

__all__ = ["Alarm", "together"]

T = TypeVar("T")
#: Who says why it is in vain to wait any longer, if it is.
Alarm: TypeAlias = Callable[[], Exception | None]
# Seconds until a broken connection has been explained, on a machine with little time for it.
_EXPLANATION = 15.0
# Seconds for an exchange that may have come to its end just when a rank was lost.
_LAST_CHANCE = 0.5


def together(work: Callable[[], T], alarm: Alarm) -> T:
    """The result of `work`, or what `alarm` gives before it is done.

    >>> together(lambda: 3, lambda: None)
    3
    """
    outcome: queue.SimpleQueue[tuple[list[T], Exception | None]] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            outcome.put(([work()], None))
        except Exception as error:
            outcome.put(([], error))

    threading.Thread(target=attempt, name="unlatch-together", daemon=True).start()
    error, reason, deadline = None, None, math.inf
    while time.monotonic() < deadline:
        try:
            result, error = outcome.get(timeout=0.2 if reason is None else _LAST_CHANCE)
        except queue.Empty:
            pass
        else:
            if error is None:
                return result[0]
            if isinstance(error, UnlatchError):
                raise error
            # The connection broke: those who watch will know in a moment whose fault it was.
            deadline = time.monotonic() + _EXPLANATION
        if reason is not None:
            raise reason
        reason = alarm()
    raise TransportError(f"an exchange between all ranks failed: {error}") from error
