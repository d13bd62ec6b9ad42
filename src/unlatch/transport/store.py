"""The key-value store that ranks meet at, and that outlives each of them."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

__all__ = ["Store", "connect_store", "host_store", "under"]

# Torch documents these names but does not export them in a way that type checkers see.
Store: TypeAlias = Any


def host_store() -> Store:
    """A store of this process, on a free port of the loopback interface."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def connect_store(timeout: float) -> Store | None:
    """A connection of one's own to the launcher's store, as the environment names it; `None` if there is none."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return None
    try:
        wait = timedelta(seconds=timeout)
        return dist.TCPStore(host, int(port), is_master=False, timeout=wait)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):
        return None


def under(prefix: str, store: Store) -> Store:
    """The same store with `prefix` in front of every key."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
