"""The processes of one run and the few collective operations they need outside of training."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["World", "current_world"]

T = TypeVar("T")
# Idle time between steps is the user's business; stuck peers are found by heartbeats, not by this.
_PATIENCE = timedelta(days=7)


class World:
    """A process alone, or one of several that run the same program.

    >>> World().gather("x")
    ['x']
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.name = self.broadcast(uuid.uuid4().hex)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.group is None:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        result: T = box[0]
        return result

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
        dist.init_process_group("gloo")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World()
    return World(dist.new_group(backend="gloo", timeout=_PATIENCE))
