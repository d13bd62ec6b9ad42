"""The processes of one run and the few collective operations they need outside of training.

From the first moment on, ranks watch each other: whoever waits here for one that is stopped, gone, or never came is
told so.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from ..errors import ConfigError, PeerLost, TransportError, UnlatchError
from .health import Health
from .notes import SECRET
from .store import Store, connect_store, host_store, store_address, under

__all__ = ["World", "current_world", "join_ranks", "stay_on_loopback"]

T = TypeVar("T")
Alarm = Callable[[], Exception | None]
# Idle time between steps is the user's business; stuck peers are found by heartbeats, not by this.
_PATIENCE = timedelta(days=7)
# Seconds until a broken connection has been explained, on a machine with little time for it.
_EXPLANATION = 15.0
# Seconds for an exchange that may have come to its end just when a rank was lost.
_LAST_CHANCE = 0.5
# Seconds for all ranks to come, if the environment does not say otherwise: importing takes long on a busy machine.
_START_LIMIT = 300.0
# All ranks make their worlds in the same order.
_numbers = itertools.count()


class World:
    """A process alone, or one of several that run the same program.

    **Arguments:** `health`: watches the others while this one waits for them.

    >>> World().gather("x")
    ['x']
    """

    def __init__(self, group: dist.ProcessGroup | None = None, health: Health | None = None) -> None:
        self.group = group
        self.health = health
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

    def _together(self, work: Callable[[], None]) -> None:
        _attend(work, self._alarm)

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
        join_ranks(stall_limit)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return World()
    health = _begin_watching(f"{next(_numbers)}", dist.get_rank(), dist.get_world_size(), stall_limit)
    try:
        group = _attend(lambda: dist.new_group(backend="gloo", timeout=_PATIENCE), health.failure)
        return World(group, health)
    except BaseException:
        health.close()
        raise


def join_ranks(stall_limit: float = 60.0, *, hosted: bool = False) -> None:
    """Meet the other ranks, where the environment says, and make the process group of all.

    To be used in place of `init_process_group`, which waits half an hour for a rank that does not come, and does not
    say for which.

    **Arguments:**

    - `stall_limit`: seconds without a sign of life after which a rank that has come counts as stuck.
    - `hosted`: whether a launcher hosts the store; otherwise rank 0 does, unless it is torchrun's own.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _attend(lambda: _meeting_place(rank, hosted), lambda: None)
    health = _begin_watching("start", rank, ranks, stall_limit)

    def meet() -> None:
        dist.init_process_group("gloo", store=under(_name("group"), store), rank=rank, world_size=ranks)
        # Whoever has passed this needs nothing more of the others to get here.
        dist.barrier()

    try:
        _attend(meet, health.failure)
    finally:
        health.close()


def stay_on_loopback() -> None:
    """Have the sockets of this process that others connect to listen for this machine alone, unless told otherwise."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _begin_watching(name: str, rank: int, ranks: int, stall_limit: float) -> Health:
    secret = os.environ.get(SECRET)
    return Health(_name(name), rank, ranks, stall_limit=stall_limit, secret=secret, start_limit=_start_limit())


def _name(what: str) -> str:
    """A name that this start of the ranks has for itself, in a store that may have seen earlier starts."""
    start = os.environ.get("UNLATCH_RESTARTS")
    if start is None and os.environ.get("GROUP_WORLD_SIZE") == "1":
        # The agents of several hosts do not agree on the number of restarts.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return f"{start or 0}/{what}"


def _start_limit() -> float:
    text = os.environ.get("UNLATCH_START_LIMIT") or str(_START_LIMIT)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ConfigError(f"UNLATCH_START_LIMIT must be a number of seconds above 0, got {text!r}")
    return limit


def _meeting_place(rank: int, hosted: bool) -> Store:
    address = store_address()
    if address is None:
        raise ConfigError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT do not name a host and a port: set them "
            "alike on all ranks, or start the ranks with torchrun or unlatch.launch"
        )
    where, limit = f"{address[0]}:{address[1]}", _start_limit()
    if rank == 0 and not hosted and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            return host_store(*address)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise TransportError(
                f"rank 0 cannot open the store at {where} (MASTER_ADDR, MASTER_PORT): {reason}. Choose a port that is "
                "free, and an address of rank 0's own host."
            ) from error
    store = connect_store(timeout=limit)
    if store is None:
        raise PeerLost(
            f"rank 0 (starting) has not opened the store at {where} (MASTER_ADDR, MASTER_PORT) within {limit:g} s of "
            f"the start of rank {rank}: look whether it was started, and whether this host reaches it. "
            "UNLATCH_START_LIMIT allows more seconds."
        )
    return store


def _attend(work: Callable[[], T], alarm: Alarm) -> T:
    """Do what all ranks do together, which nothing can interrupt, on a thread, so that this one can hear the alarm."""
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
