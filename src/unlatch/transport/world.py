"""The processes of one run and the few collective operations they need outside of training."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import TransportError
from .meeting import join_group

__all__ = ["World", "current_world"]

T = TypeVar("T")
# Idle time between steps is the user's business; stuck peers are found by heartbeats, not by this.
_PATIENCE = timedelta(days=7)
# Seconds until a broken connection has been explained, on a machine with little time for it.
_EXPLANATION = 15.0


class World:
    """A process alone, or one of several that run the same program.

    >>> World().gather("x")
    ['x']
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self._alarm: Callable[[], Exception | None] | None = None
        self.name = self.broadcast(uuid.uuid4().hex)

    def heed(self, alarm: Callable[[], Exception | None]) -> None:
        """Raise what `alarm` returns, if anything, instead of waiting on for a rank that is gone or stuck."""
        self._alarm = alarm

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        self._together(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box: list[Any] = [value]
        self._together(lambda: dist.broadcast_object_list(box, src=0, group=self.group))
        result: T = box[0]
        return result

    def collect(self, value: T) -> list[T] | None:
        """The values of all ranks, by rank, on rank 0; elsewhere `None`."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._together(lambda: dist.gather_object(value, values, dst=0, group=self.group))
        return values

    def share_out(self, values: Sequence[T] | None) -> T:
        """For each rank its own one of rank 0's `values`, which nobody else needs to have."""
        if self.group is None:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        given = list(values) if values is not None else None
        self._together(lambda: dist.scatter_object_list(box, given, src=0, group=self.group))
        result: T = box[0]
        return result

    def aside(self) -> World:
        """The same ranks with connections of their own, for exchanges on another thread. Made by all ranks together."""
        other = World.__new__(World)
        other.group = None if self.group is None else dist.new_group(backend="gloo", timeout=_PATIENCE)
        other.rank, other.size, other.name, other._alarm = self.rank, self.size, self.name, self._alarm
        return other

    def _together(self, work: Callable[[], None]) -> None:
        """Do a collective operation, which nothing can interrupt, on a thread, so that this one can hear the alarm."""
        if self._alarm is None:
            work()
            return
        outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def attempt() -> None:
            try:
                work()
                outcome.put(None)
            except Exception as error:
                outcome.put(error)

        threading.Thread(target=attempt, name="unlatch-together", daemon=True).start()
        error, deadline = None, math.inf
        while time.monotonic() < deadline:
            try:
                error = outcome.get(timeout=0.2)
            except queue.Empty:
                pass
            else:
                if error is None:
                    return
                # The connection broke: those who watch will know in a moment whose fault it was.
                deadline = time.monotonic() + _EXPLANATION
            if (reason := self._alarm()) is not None:
                raise reason
        raise TransportError(f"an exchange between all ranks failed: {error}") from error

    def close(self) -> None:
        """Give the process group back."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def current_world(distributed: bool | None = None) -> World:
    """The world this process lives in: that of an initialised process group or of torchrun, else itself alone.

    **Arguments:** `distributed`: `False` insists on a world of one.
    """
    if distributed is False:
        return World()
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        join_group()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World()
    return World(dist.new_group(backend="gloo", timeout=_PATIENCE))
