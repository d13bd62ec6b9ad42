"""Where the processes of one start find each other, in a store that may remember processes of an earlier one.

torchrun keeps its store when it starts its processes anew, with all that the dead ones wrote: who takes their addresses
for those of the living connects to nobody and waits. Nor is the count of restarts that torchrun hands out the same on
every host. So each process says hello with a word that nobody said before, rank 0 calls the roll, and when all whom it
called have answered, they use keys that bear the name of that roll.
"""

from __future__ import annotations

import math
import os
import re
import time
import uuid

import torch.distributed as dist

from ..errors import ConfigError, PeerLost, TransportError
from .health import Health
from .notes import SECRET, Notary
from .store import Store, connect_store, fetch, host_store, store_address, under
from .together import together

__all__ = ["START_LIMIT", "join_group", "meet", "place", "start_limit", "start_name"]

# Seconds for all processes to come: each of them has to import torch first, and the machine may be busy.
START_LIMIT = 300.0
_PAUSE = 0.02
# Seconds after which a store is cut off that should have brought the answer of those who came in time.
_SILENCE = 5.0
_ROLL = {"name": str, "called": list}
# The roll that this process was on.
_start = "alone"


def start_limit() -> float:
    """Seconds for all processes to come, if nobody says otherwise: `UNLATCH_START_LIMIT` does."""
    text = os.environ.get("UNLATCH_START_LIMIT") or str(START_LIMIT)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ConfigError(f"UNLATCH_START_LIMIT must be a number of seconds above 0, got {text!r}")
    return limit


def place() -> tuple[int, int]:
    """Number of this process and of all processes, as the environment names them.

    >>> place()
    Traceback (most recent call last):
        ...
    unlatch.errors.ConfigError: RANK and WORLD_SIZE must be whole numbers, the first below the second, got None and None
    """
    texts = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    # More digits than any cluster has processes; longer ones are not even numbers to Python.
    known = [int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else -1 for text in texts]
    if not 0 <= known[0] < known[1]:
        named = " and ".join(f"{text!r:.40}" for text in texts)
        raise ConfigError(f"RANK and WORLD_SIZE must be whole numbers, the first below the second, got {named}")
    return known[0], known[1]


def start_name() -> str:
    """A name that this start of all processes has for itself, in a store that may have seen earlier ones."""
    return _start


def join_group(store: Store | None = None, limit: float | None = None, stall_limit: float = 60.0) -> None:
    """Form the process group that the environment names, with processes of this start only.

    To be used in place of `init_process_group`, which waits half an hour for a process that does not come, or that was
    stopped on its way, and does not say for which.

    **Arguments:**

    - `store`: where to meet; default: the one that the environment names, which rank 0 hosts unless torchrun does.
    - `limit`: seconds to wait for the others; default: `start_limit()`.
    - `stall_limit`: seconds without a sign of life after which one that has come counts as stuck.
    """
    global _start
    rank, ranks = place()
    limit = limit if limit is not None else start_limit()
    deadline = time.monotonic() + limit + _SILENCE
    found = store if store is not None else together(lambda: _meeting_place(rank, limit), lambda: None)

    def cut_off() -> PeerLost | None:
        text = f"rank 0 (starting) or its host is gone, or cut off from rank {rank}: the store does not answer"
        return PeerLost(text) if time.monotonic() > deadline else None

    _start = together(lambda: meet(found, rank, ranks, limit), cut_off)
    health = Health(f"{_start}/start", rank, ranks, stall_limit=stall_limit, secret=os.environ.get(SECRET))

    def connect() -> None:
        dist.init_process_group("gloo", store=under(f"unlatch/{_start}/group", found), rank=rank, world_size=ranks)
        # Whoever has passed this needs nothing more of the others to get here.
        dist.barrier()

    try:
        together(connect, health.failure)
    finally:
        health.close()


def _meeting_place(rank: int, limit: float) -> Store:
    address = store_address()
    if address is None:
        raise ConfigError(
            "RANK and WORLD_SIZE are set, but MASTER_ADDR and MASTER_PORT do not name a host and a port: set them "
            "alike on all ranks, or start the ranks with torchrun or unlatch.launch"
        )
    where = f"{address[0]}:{address[1]} (MASTER_ADDR, MASTER_PORT)"
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            return host_store(*address)
        except (OSError, RuntimeError) as error:
            raise TransportError(
                f"rank 0 cannot open the store at {where}: {str(error).splitlines()[0]}. Choose a port that is free, "
                "and an address of rank 0's own host."
            ) from error
    store = connect_store(timeout=limit)
    if store is None:
        raise PeerLost(
            f"rank 0 (starting) has not opened the store at {where} within {limit:g} s of the start of rank {rank}: "
            "look whether it was started, and whether this host reaches it. UNLATCH_START_LIMIT allows more seconds."
        )
    return store


def meet(store: Store, rank: int, ranks: int, limit: float = START_LIMIT) -> str:
    """Wait for all `ranks` processes, for at most `limit` seconds.

    **Returns:** a name for this meeting that no other one has.
    """
    hello = uuid.uuid4().hex
    store.set(f"unlatch/hello/{rank}", hello)
    deadline = time.monotonic() + limit
    notary = Notary(os.environ.get(SECRET))
    if rank == 0:
        return _call(store, notary, ranks, deadline, limit)
    return _answer(store, notary, rank, hello, deadline, limit)


def _call(store: Store, notary: Notary, ranks: int, deadline: float, limit: float) -> str:
    """Call the roll until everyone on it has answered; who comes while it is called is on the next one."""
    name, called, silent = "", dict[int, str](), set(range(ranks))
    while silent:
        present = {r: _read(store, f"unlatch/hello/{r}") for r in range(ranks)}
        if present != called:
            name, called, silent = uuid.uuid4().hex, present, set(range(1, ranks))
            store.set("unlatch/roll", notary.write("unlatch/roll", {"name": name, "called": list(present.values())}))
        silent -= {r for r in silent if _read(store, f"unlatch/here/{name}/{r}")}
        if silent:
            if time.monotonic() > deadline:
                raise _absent(silent, limit)
            time.sleep(_PAUSE)
    store.set(f"unlatch/go/{name}", "1")
    return name


def _answer(store: Store, notary: Notary, rank: int, hello: str, deadline: float, limit: float) -> str:
    """Answer every roll that this process is on, until one is complete."""
    answered, missing = "", {0}
    while not (answered and _read(store, f"unlatch/go/{answered}")):
        raw = fetch(store, "unlatch/roll")
        roll = notary.read("unlatch/roll", raw, _ROLL, unsigned=True) if raw is not None else None
        if roll is not None and roll["name"] != answered and hello in roll["called"][rank : rank + 1]:
            answered = roll["name"]
            store.set(f"unlatch/here/{answered}/{rank}", "1")
            missing = {r for r, word in enumerate(roll["called"]) if not word} or {0}
        if time.monotonic() > deadline:
            raise _absent(missing, limit)
        time.sleep(_PAUSE)
    return answered


def _absent(ranks: set[int], limit: float) -> PeerLost:
    who = ", ".join(f"rank {rank}" for rank in sorted(ranks))
    return PeerLost(
        f"{who} (starting) did not come within {limit:g} s of the start: stopped, not started, or not able to reach "
        "the others; look at its output. UNLATCH_START_LIMIT allows more seconds."
    )


def _read(store: Store, key: str) -> str:
    return (fetch(store, key) or b"").decode(errors="replace")
