"""The processes of one run and the few collective operations they need outside of training.

From the first moment on, ranks watch each other: whoever waits here for one that is stopped, gone, or never came is
told so.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .calls import Calls, out_of_step
from .health import Health
from .meeting import join_group, start_limit, start_name
from .memory import keep_freed_memory
from .notes import SECRET
from .together import Alarm, together

__all__ = ["World", "current_world"]

T = TypeVar("T")
# Idle time between steps is the user's business; stuck peers are found by heartbeats, not by this.
_PATIENCE = timedelta(days=7)
# All ranks make their worlds in the same order.
_numbers = itertools.count()
# Bytes of the name of a call.
_NAME = 32


class World:
    """A process alone, or one of several that run the same program.

    **Arguments:** `health`: watches the others while this one waits for them.

    >>> World().gather("x")
    ['x']
    """

    def __init__(self, group: dist.ProcessGroup | None = None, health: Health | None = None) -> None:
        self.group = group
        self.health = health
        #: What is called here; an exchange is part of what is under way.
        self.calls = health.calls if health is not None else Calls()
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self._alarm: Alarm = health.failure if health is not None else lambda: None
        if health is not None:
            health.trust(self.broadcast(os.environ.get(SECRET) or secrets.token_hex(32)))

    def heed(self, alarm: Alarm) -> None:
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
        self.meet()
        with self.calls.waiting():
            other = World(_new_group(self._alarm) if self.group is not None else None)
        other.heed(self._alarm)
        return other

    def connect(
        self,
        ways: Sequence[tuple[int, int]],
        backend: str,
        try_out: Callable[[dist.ProcessGroup, tuple[int, int]], None],
    ) -> dict[tuple[int, int], dist.ProcessGroup]:
        """A group of two ranks for every way from a rank to a rank. Made by all ranks together, in the order of `ways`.

        **Arguments:** `try_out`: called with each new group on its two ranks, before the next one is made.

        **Returns:** those that this rank is in.
        """
        found: dict[tuple[int, int], dist.ProcessGroup] = {}

        def make() -> None:
            for way in ways:
                group = dist.new_group(list(way), timeout=_PATIENCE, backend=backend)
                if self.rank in way:
                    try_out(group, way)
                    found[way] = group

        self._together(make)
        return found

    def meet(self) -> None:
        """Wait until all ranks have come here, in the same call."""
        if self.group is not None:
            self._together(lambda: None)

    def _together(self, work: Callable[[], None]) -> None:
        call = self.calls.now

        def in_step() -> None:
            self._call_roll(call)
            work()

        with self.calls.waiting():
            together(in_step, self._alarm)

    def _call_roll(self, call: str) -> None:
        """Do all ranks mean the same exchange? One that meets another's would bring garbage or break connections."""
        if self.health is None:
            return
        name = torch.frombuffer(bytearray(call.encode()[:_NAME].ljust(_NAME)), dtype=torch.uint8)
        names = [torch.empty_like(name) for _ in range(self.size)]
        dist.all_gather(names, name, group=self.group)
        told = {rank: bytes(found.tolist()).decode().strip() for rank, found in enumerate(names)}
        if len(set(told.values())) > 1:
            raise out_of_step(told, self.health.describe)

    @contextmanager
    def telling_of_errors(self) -> Iterator[None]:
        """Tell the others of an error that leaves this block: they wait for this rank in vain."""
        try:
            yield
        except BaseException as error:
            if self.health is not None:
                lines = str(error).splitlines()
                self.health.leave_note(lines[0] if lines else type(error).__name__)
            raise

    def close(self) -> None:
        """Take leave of the others and give the process group back."""
        if self.health is not None:
            self.health.close()
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None


def current_world(distributed: bool | None = None, stall_limit: float = 60.0) -> World:
    """The world this process lives in: that of an initialised process group or of torchrun, else itself alone.

    **Arguments:**

    - `distributed`: `False` insists on a world of one.
    - `stall_limit`: seconds without a sign of life after which a rank counts as stuck.
    """
    if distributed is False:
        return World()
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        join_group(stall_limit=stall_limit)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World()
    keep_freed_memory()
    health = Health(
        f"{start_name()}/{next(_numbers)}",
        dist.get_rank(),
        dist.get_world_size(),
        stall_limit=stall_limit,
        secret=os.environ.get(SECRET),
        start_limit=start_limit(),
    )
    try:
        return World(_new_group(health.failure), health)
    except BaseException:
        health.close()
        raise


def _new_group(alarm: Alarm) -> dist.ProcessGroup:
    """Connections that nothing else travels on. Made by all ranks together."""
    group: dist.ProcessGroup = together(lambda: dist.new_group(backend="gloo", timeout=_PATIENCE), alarm)
    return group
