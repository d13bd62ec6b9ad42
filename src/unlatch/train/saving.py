"""A checkpoint while it is written: by a thread, from copies, so that training goes on meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UnlatchError
from ..io import checkpoint
from ..io.checkpoint import Checkpoint
from ..transport.world import World

__all__ = ["Saving"]


class Saving:
    """One checkpoint, written by rank 0 from what all ranks hand over. The same on every rank.

    **Arguments:**

    - `path`: where it goes.
    - `world`: of connections that nothing else uses meanwhile.
    - `part`: what this rank hands over; may wait for messages under way.
    - `made`: the checkpoint of all parts, by rank.
    - `landed`: called on rank 0 once it is in place.
    """

    def __init__(
        self,
        path: Path,
        world: World,
        part: Callable[[], Any],
        made: Callable[[Sequence[Any]], Checkpoint],
        landed: Callable[[], None],
    ) -> None:
        self.path = path
        self._world = world
        self._part, self._made, self._landed = part, made, landed
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._save, name="unlatch-save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, for better or worse."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return once the checkpoint is in place, or raise what went wrong, on every rank alike."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _save(self) -> None:
        try:
            parts = self._world.collect(self._part())
            error = self._written(parts) if parts is not None else None
            self._error = self._world.broadcast(error)
        except Exception as error:
            self._error = error

    def _written(self, parts: Sequence[Any]) -> Exception | None:
        """What came of it; the other ranks must not wait for a checkpoint that will not come."""
        try:
            checkpoint.write(self.path, self._made(parts))
            self._landed()
        except (UnlatchError, ValueError, TypeError) as error:
            return error
        except Exception as error:
            # Disks and memory run out in many ways.
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            return UnlatchError(
                f"{self.path}: the checkpoint could not be written: {why}; what was there before is as it was"
            )
        return None
