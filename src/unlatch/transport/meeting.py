"""Where the processes of one start find each other, in a store that may remember processes of an earlier one.

torchrun keeps its store when it starts its processes anew, with all that the dead ones wrote: who takes their addresses
for those of the living connects to nobody and waits. Nor is the count of restarts that torchrun hands out the same on
every host. So each process says hello with a word that nobody said before, rank 0 calls the roll, and when all whom it
called have answered, they use keys that bear the name of that roll.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import PeerLost
from .store import Store, under

__all__ = ["join_group", "meet"]

# Seconds for all processes to come: each of them has to import torch first, and the machine may be busy.
START_LIMIT = 300.0
_PAUSE = 0.02
# What torch allows its own store.
_PATIENCE = timedelta(minutes=30)


def join_group(store: Store | None = None, limit: float = START_LIMIT) -> None:
    """Form the process group that the environment names, with processes of this start only.

    **Arguments:**

    - `store`: where to meet; default: the one that the environment names, which rank 0 hosts unless torchrun does.
    - `limit`: seconds to wait for the others.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if store is None:
        try:
            store, rank, ranks = next(rendezvous("env://", rank, ranks, timeout=timedelta(seconds=limit)))
        except dist.DistError as error:
            raise PeerLost(f"rank {rank} found no store to meet the others at within {limit:g} s: {error}") from error
        store.set_timeout(_PATIENCE)
    dist.init_process_group("gloo", store=meet(store, rank, ranks, limit), rank=rank, world_size=ranks)


def meet(store: Store, rank: int, ranks: int, limit: float = START_LIMIT) -> Store:
    """Wait for all `ranks` processes, for at most `limit` seconds.

    **Returns:** the part of the store that belongs to them alone.
    """
    hello = uuid.uuid4().hex
    store.set(f"unlatch/hello/{rank}", hello)
    deadline = time.monotonic() + limit
    name = _call(store, ranks, deadline, limit) if rank == 0 else _answer(store, rank, hello, deadline, limit)
    return under(f"unlatch/start/{name}", store)


def _call(store: Store, ranks: int, deadline: float, limit: float) -> str:
    """Call the roll until everyone on it has answered; who comes while it is called is on the next one."""
    name, called, silent = "", dict[int, str](), set(range(ranks))
    while silent:
        present = {r: _read(store, f"unlatch/hello/{r}") for r in range(ranks)}
        if present != called:
            name, called, silent = uuid.uuid4().hex, present, set(range(1, ranks))
            store.set("unlatch/roll", json.dumps([name, list(present.values())]))
        silent -= {r for r in silent if _read(store, f"unlatch/here/{name}/{r}")}
        if silent:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"ranks {sorted(silent)} did not come within {limit:g} s: they are stopped, or did not start; look "
                    "at their output"
                )
            time.sleep(_PAUSE)
    store.set(f"unlatch/go/{name}", "1")
    return name


def _answer(store: Store, rank: int, hello: str, deadline: float, limit: float) -> str:
    """Answer every roll that this process is on, until one is complete."""
    answered = ""
    while not (answered and _read(store, f"unlatch/go/{answered}")):
        name, called = json.loads(_read(store, "unlatch/roll") or '["", []]')
        if name != answered and hello in called[rank : rank + 1]:
            store.set(f"unlatch/here/{name}/{rank}", "1")
            answered = name
        if time.monotonic() > deadline:
            raise PeerLost(
                f"rank {rank} was not called by rank 0 within {limit:g} s: not all ranks came; look at their output"
            )
        time.sleep(_PAUSE)
    return answered


def _read(store: Store, key: str) -> str:
    return str(store.get(key), "utf8") if store.check([key]) else ""
