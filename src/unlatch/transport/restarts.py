"""Ranks that are started anew: how often they were, and whether another start is worth it."""

from __future__ import annotations

import logging
import os

from ..errors import ConfigError, NoProgress, PeerLost, StageFailed, TransportError

__all__ = ["Attempts", "may_pass", "restarts"]

_log = logging.getLogger("unlatch")


def restarts() -> int:
    """How often the ranks were started anew, by `launch` or torchrun, after one of them was lost."""
    for name in ("UNLATCH_RESTARTS", "TORCHELASTIC_RESTART_COUNT"):
        if text := os.environ.get(name):
            if not text.isascii() or not text.isdecimal():
                raise ConfigError(f"{name} in the environment must be a whole number, got {text[:40]!r}")
            return int(text)
    return 0


def may_pass(error: BaseException) -> bool:
    """Whether an error may not come again: a rank was lost, a connection broke, or code raised inside of a rank.

    All others say that what was asked for is wrong, or that it was asked to stop; so does code that exits on purpose.

    >>> from ..errors import ConfigError
    >>> may_pass(PeerLost("rank 1 was killed")), may_pass(ConfigError("lr must be positive"))
    (True, False)
    """
    on_purpose = error.__cause__ is not None and not isinstance(error.__cause__, Exception)
    return isinstance(error, PeerLost | TransportError | StageFailed) and not on_purpose


class Attempts:
    """Counts the starts of one job.

    **Arguments:** `limit`: how often the ranks may be started anew.
    """

    def __init__(self, limit: int) -> None:
        self.restarts = 0
        self._limit = limit
        self._saved: int | None = None
        self._saved_before: int | None = None
        self._first: BaseException | None = None

    def saved(self, step: int) -> None:
        """Note that there is a checkpoint with everything up to batch `step`."""
        self._saved = step if self._saved is None else max(self._saved, step)

    def failed(self, error: BaseException) -> None:
        """Return if the ranks may be started anew; else raise what ends the job."""
        if not self._limit or not may_pass(error):
            raise error
        if self._first is not None and self._saved == self._saved_before:
            where = "before a checkpoint was written" if self._saved is None else f"with none newer than {self._at()}"
            raise NoProgress(
                f"2 attempts in a row failed {where}, so starting the ranks again does not help. The first cause was: "
                f"{_in_short(self._first)}"
            ) from self._first
        if self.restarts == self._limit:
            error.add_note(f"The ranks had been started anew {self.restarts} time(s), as often as max_restarts allows.")
            raise error
        self.restarts += 1
        self._first, self._saved_before = error, self._saved
        place = "there is no checkpoint yet" if self._saved is None else f"the last checkpoint is that of {self._at()}"
        _log.warning("restart %d of %d: %s; %s", self.restarts, self._limit, _in_short(error), place)

    def _at(self) -> str:
        return f"step {self._saved}"


def _in_short(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
