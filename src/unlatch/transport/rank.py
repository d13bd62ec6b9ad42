"""Life of a process that `launch` started: meet the others, run what the launcher sends, report, and end with it."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

import psutil
import torch

from ..errors import ConfigError, Interrupted, PeerLost, StageFailed
from .ending import end_all
from .meeting import join_group
from .memory import keep_freed_memory
from .notes import SECRET
from .parcel import survives
from .reports import open_line, report
from .signals import REQUESTS
from .store import connect_store

__all__ = ["Place", "killed_by_the_kernel", "serve"]


@dataclass(frozen=True)
class Place:
    """Which rank a process is, and of what.

    **Arguments:**

    - `port`: of the launcher's store.
    - `secret`: what ranks sign their notes there with.
    - `threads`: intra-op threads.
    - `parent`: process id of the launcher.
    - `bound`: whether the thread that started this process lives as long as the launcher does.
    - `start_limit`: seconds to wait for the other ranks.
    """

    rank: int
    ranks: int
    port: int
    secret: str
    threads: int
    parent: int
    bound: bool
    start_limit: float


def serve(line: Connection, place: Place) -> None:
    """Be a rank, until the launcher has nothing more to run or a job fails."""
    faulthandler.enable()
    # The launcher's way to start this process is none of user code: a DataLoader forks its workers, as in any program.
    multiprocessing.set_start_method(None, force=True)
    _leave_signals_to_the_parent()
    _end_with(place.parent, place.bound)
    torch.set_num_threads(place.threads)
    keep_freed_memory()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
        RANK=str(place.rank),
        WORLD_SIZE=str(place.ranks),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(place.ranks),
    )
    os.environ[SECRET] = place.secret
    _stay_on_loopback()
    open_line(line)
    try:
        _join_group(place)
    except Exception as error:
        text = str(error) if isinstance(error, PeerLost) else f"rank {place.rank} could not join the others: {error}"
        report("failed", PeerLost(text), traceback.format_exc())
        code = 1
    else:
        report("joined")
        code = _work(line, place.rank)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads may still sit in the communication library, whose destructors would wait for peers that are gone.
    os._exit(code)


def _stay_on_loopback() -> None:
    """Have the sockets that other ranks connect to listen for this machine alone, unless the user wants another."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _join_group(place: Place) -> None:
    store = connect_store(timeout=place.start_limit)
    if store is None:
        raise PeerLost(f"rank {place.rank} does not reach the launcher's store")
    join_group(store, place.start_limit)


def _work(line: Connection, rank: int) -> int:
    """Run jobs until there are none left or one fails. **Returns:** the exit code."""
    while True:
        try:
            job = line.recv()
        except (EOFError, OSError):
            return 0
        except Exception as error:
            text = f"rank {rank} cannot import what it is to run ({error}): it must be importable, so define it at the "
            report("failed", ConfigError(f"{text}top level of a module or of a script that is a file"), "")
            return 1
        if job is None:
            return 0
        fn, args, restarts = job
        os.environ["UNLATCH_RESTARTS"] = str(restarts)
        try:
            result = fn(*args)
            end_all()
        except BaseException as error:
            report("failed", _portable(error), "".join(traceback.format_exception(error)))
            return error.number + 128 if isinstance(error, Interrupted) else 1
        try:
            report("done", result)
        except Exception as error:
            report("failed", ConfigError(f"the result of rank {rank} cannot be sent back: {error}"), "")
            return 1


def _portable(error: BaseException) -> BaseException:
    """The error itself if it survives the trip to the parent, else one of the same text."""
    return error if survives(error) else StageFailed(f"{type(error).__name__}: {error}")


def _leave_signals_to_the_parent() -> None:
    """A signal to the whole process group reaches ranks too: what it means for them, the parent decides."""
    for number in REQUESTS:
        # Not ignored but made nothing of: programs that this one starts would inherit deafness.
        signal.signal(number, _make_nothing_of_it)
    os.register_at_fork(after_in_child=_hear_again)
    # Blocked by the launcher until here, where the interpreter starts and imports.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)


def _make_nothing_of_it(number: int, frame: FrameType | None) -> None:
    pass


def _hear_again() -> None:
    """Workers that user code forks are ended by SIGTERM, as it expects."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_with(parent: int, bound: bool) -> None:
    """See to it that this process does not outlive its launcher."""
    if not (bound and killed_by_the_kernel()):
        threading.Thread(target=_watch, args=(parent,), name="unlatch-parent", daemon=True).start()
    if os.getppid() != parent:
        # It ended before anybody was asked to notice.
        os._exit(1)


def killed_by_the_kernel() -> bool:
    """Ask Linux to kill this process when the thread that started it ends: that reaches a stopped process as well."""
    if not sys.platform.startswith("linux"):
        return False
    set_parent_death_signal = 1
    return bool(ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0) == 0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
