"""What a launcher makes of a request to stop: it passes it on to ranks that heed it, or ends ranks that do not."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence

from ..errors import Interrupted
from .nursery import Worker
from .signals import REQUESTS, handling, interrupt

__all__ = ["Forwarding"]

_log = logging.getLogger("unlatch")


class Forwarding:
    """Requests to stop on their way from the launcher to its ranks.

    Those that no rank would answer raise `Interrupted`, out of whatever the launcher's main thread is waiting for.

    **Arguments:** `ranks`: the processes, as the launcher starts and ends them.
    """

    def __init__(self, ranks: Sequence[Worker]) -> None:
        self._ranks = ranks
        self._heeding: list[int] = []
        self._undisturbed = 0
        self._reset()

    def _reset(self) -> None:
        #: The signal that asked to stop.
        self.asked: int | None = None
        self._answered = self._insisted = False

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT are meant for the ranks, unless the program handles or ignores them on purpose."""
        self._reset()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = (signal.SIG_DFL, signal.default_int_handler, interrupt)
        ours = [number for number in REQUESTS if signal.getsignal(number) in usual]
        with handling(self._hear, self._hear_again, ours):
            yield

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Inside, nothing is raised by a signal: `check` does it later."""
        self._undisturbed += 1
        try:
            yield
        finally:
            self._undisturbed -= 1

    def check(self) -> None:
        """Raise `Interrupted` if there was a request that no rank has answered or is going to."""
        if self.asked is not None and (self._insisted or not (self._answered or self._heeding)):
            raise Interrupted(self.asked)

    def heeded(self, rank: int, begins: bool, heard: bool) -> None:
        """Note that a rank begins to heed signals, or that it no longer does and whether it has heard one."""
        if begins:
            self._heeding.append(rank)
        else:
            self._heeding.remove(rank)
        self._answered |= heard
        self.check()

    def forget_ranks(self) -> None:
        """Those who heeded are gone."""
        self._heeding.clear()

    def _hear(self, number: int) -> None:
        self.asked = number
        if self._undisturbed:
            return
        self.check()
        name = signal.Signals(number).name
        _log.warning("%s: the ranks save what they have and stop; another one ends them at once", name)
        for rank in self._ranks:
            if rank.pid is not None and rank.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, number)

    def _hear_again(self, number: int) -> None:
        self.asked, self._insisted = number, True
        if not self._undisturbed:
            self.check()
