"""The key-value store that ranks meet at, and that outlives each of them."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

__all__ = ["Clerk", "Store", "connect_store", "fetch", "host_store", "store_address", "under"]

T = TypeVar("T")
# Torch documents these names but does not export them in a way that type checkers see.
Store: TypeAlias = Any
# Connections that may wait to be accepted: all ranks of a machine come at once.
_BACKLOG = 1024


def host_store(host: str = "127.0.0.1", port: int = 0) -> Store:
    """A store of this process, on a free port unless one is named.

    Only this machine can reach it if `host` is the loopback interface; else every interface is listened on, since a
    name may stand for one address here and for another elsewhere.
    """
    common: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
    if host not in ("localhost", "::1") and not host.startswith("127."):
        return dist.TCPStore(host, port, **common)  # type: ignore[attr-defined]
    # Left to itself the store would listen on every interface here too.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return dist.TCPStore(host, port, master_listen_fd=listener.detach(), **common)  # type: ignore[attr-defined]


def store_address() -> tuple[str, int] | None:
    """Host and port of the launcher's store, as the environment names them; `None` if it does not."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    return (host, int(port)) if host and re.fullmatch("[0-9]{1,5}", port) and int(port) < 2**16 else None


def connect_store(timeout: float) -> Store | None:
    """A connection of one's own to the launcher's store; `None` if there is no store, or none that answers."""
    address = store_address()
    if address is None:
        return None
    try:
        wait = timedelta(seconds=timeout)
        return dist.TCPStore(*address, is_master=False, timeout=wait)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):
        return None


def under(prefix: str, store: Store) -> Store:
    """The same store with `prefix` in front of every key."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def fetch(store: Store, key: str) -> bytes | None:
    """What is stored under `key`, without waiting for somebody to store it."""
    found: bytes | None = store.get(key) if store.check([key]) else None
    return found


class Clerk:
    """Runs errands to a store on a thread of its own: a store that was cut off neither answers nor gives up.

    >>> clerk = Clerk(host_store())
    >>> clerk.ask(lambda store: store.set("key", "value")).result(timeout=10)
    >>> clerk.ask(lambda store: fetch(store, "key")).result(timeout=10)
    b'value'
    >>> clerk.close()
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closed = False
        self._errands: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unlatch-store", daemon=True)
        self._thread.start()

    def ask(self, errand: Callable[[Store], T]) -> Future[T]:
        """Have `errand` done after all earlier ones; whoever needs the result decides how long to wait for it."""
        answer: Future[T] = Future()
        if self._closed:
            answer.set_exception(RuntimeError("nobody goes to the store any more"))
        else:
            self._errands.put((errand, answer))
        return answer

    def close(self, patience: float = 0.0) -> None:
        """Go home after the errands under way, however long a store that is cut off takes for them.

        **Arguments:** `patience`: seconds to wait for that.
        """
        self._closed = True
        self._errands.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            work, answer = errand
            try:
                answer.set_result(work(self._store))
            except Exception as error:
                answer.set_exception(error)
