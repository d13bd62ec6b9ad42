"""Requests to stop that come as signals: each heard once, however many ways it takes to a process.

A terminal, SLURM or Docker sends a signal to the whole process group, and a launcher passes on what it hears, so one
request reaches a rank several times. What comes shortly after the first signal is therefore the same request, and only
a later one means "at once".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import Interrupted
from .reports import report

__all__ = ["REQUESTS", "handling", "heeding_signals", "held_back", "interrupt"]

#: Signals that ask a process to end.
REQUESTS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which further signals belong to the first one.
_SAME_REQUEST = 2.0


def interrupt(number: int, frame: FrameType | None = None) -> None:
    """A handler for programs with nothing to save: it ends them by `Interrupted`, which cleans up on its way out.

    `Ranks` puts its own in its place while there are ranks to think of.
    """
    raise Interrupted(number)


@contextmanager
def held_back() -> Iterator[None]:
    """Inside, requests wait. A process that is started there inherits that: it hears of them when it can handle them.

    Without it, one that comes while its interpreter starts ends it with a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def heeding_signals(on_first: Callable[[int], None]) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM calls `on_first(number)`; a second one ends the process at once.

    Signals within 2 s of the first one are the same request. A rank that hears a second one exits on the spot with
    128 + number, since it may wait for others that no longer answer; a process alone raises `Interrupted`. Outside of
    the main thread, which alone can hear signals, this does nothing.

    **Arguments:** `on_first`: called in the middle of whatever the main thread does, so it must not wait for a lock
    that this thread may hold: it sets a flag, or starts a thread that does the rest.
    """

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def first(number: int) -> None:
        nonlocal heard
        heard = True
        on_first(number)

    def again(number: int) -> None:
        if "RANK" in os.environ:
            os._exit(128 + number)
        raise Interrupted(number)

    with handling(first, again):
        report("heeding", True, False)
        try:
            yield
        finally:
            report("heeding", False, heard)


@contextmanager
def handling(
    on_first: Callable[[int], None], again: Callable[[int], None], requests: Iterable[int] = REQUESTS
) -> Iterator[None]:
    """Inside, call `on_first(number)` at the first of these signals and `again(number)` at those that mean it.

    For the main thread only.
    """
    first: float | None = None

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            on_first(number)
        elif now - first >= _SAME_REQUEST:
            again(number)

    before = {number: signal.signal(number, heard) for number in requests}
    try:
        yield
    finally:
        for number, handler in before.items():
            # One that was not installed from Python cannot be put back from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
