"""Starts ranks at the price of one: an interpreter imports what all of them need, forks them, and ends.

    launcher ---spawns---> nursery: imports torch and unlatch, once
       |                      |---forks---> rank 0, rank 1, ...: each imports the user's main module by itself
       |                    (ends)
       '----adopts---> ranks: from here on children of the launcher, as if it had started each of them

Imports are nearly all of the CPU time that it takes to start a rank. The nursery has imported and done nothing else
when it forks: it has no thread, lock, connection or accelerator of its own that a fork could break (so nothing in this
library may touch an accelerator when it is imported), it has the environment that the launcher has now, and it lives
for this one start. Since ranks are the launcher's own children then, exit codes,
signals, ending with the parent and memory accounts are what they are for any child.

Linux hands orphans to the nearest ancestor that has asked for them (`PR_SET_CHILD_SUBREAPER`), which the launcher does
for as long as there is a nursery. Where that is not to be had, every rank is an interpreter of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import process, resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
import torch

from .parcel import starting_interpreters
from .rank import Place, killed_by_the_kernel, serve
from .signals import held_back

__all__ = ["Nursery", "Worker"]

# What jobs on ranks begin with. By name: it lies above this layer.
_NEEDED = ("unlatch.train",)
_BIRTH = struct.Struct("ii")
# Seconds between two looks at a process that is to end.
_LOOK = 0.005
# The exit code of a process of which only the end is known.
_UNKNOWN = 255
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37


class Worker(Protocol):
    """A child process, as `multiprocessing` shows its own."""

    @property
    def pid(self) -> int | None:
        """Its number, once it has one."""

    @property
    def exitcode(self) -> int | None:
        """How it ended, negative for a signal; `None` while it lives."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    def kill(self) -> None:
        """End it at once."""


class Nursery:
    """A start of ranks.

    **Arguments:** `places`: of the ranks, in order.

    `workers` are the ranks, `lines` the launcher's ends of the connections to them.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.workers: list[Worker] = []
        self.lines: list[Connection] = []
        self._born: dict[int, int] = {}
        self._births: Connection | None = None
        self._interpreter: Worker | None = None
        # It starts with the first child otherwise, and lets signals through again.
        resource_tracker.ensure_running()
        self._adopts = _adopting.begin()
        try:
            if self._adopts:
                self._fork(places)
            else:
                self._spawn(places)
        except BaseException:
            self.over()
            raise

    def _fork(self, places: Sequence[Place]) -> None:
        context = multiprocessing.get_context("spawn")
        ends = [context.Pipe() for _ in places]
        births, told = context.Pipe(duplex=False)
        theirs = [end for _, end in ends]
        with starting_interpreters():
            preparation = spawn.get_preparation_data("")
        self._interpreter = _fresh_interpreter(theirs, told, list(places), preparation)
        for end in (*theirs, told):
            end.close()
        self._births = births
        self.lines = [ours for ours, _ in ends]
        self.workers = [_Adopted(self, place.rank) for place in places]

    def _spawn(self, places: Sequence[Place]) -> None:
        context = multiprocessing.get_context("spawn")
        with starting_interpreters():
            for place in places:
                ours, theirs = context.Pipe()
                worker = context.Process(target=serve, args=(theirs, place), name=_name(place), daemon=False)
                with held_back():
                    worker.start()
                theirs.close()
                self.lines.append(ours)
                self.workers.append(worker)

    def born(self, rank: int, *, patiently: bool = False) -> int | None:
        """The number of a rank's process, if it has one.

        **Arguments:** `patiently`: wait until it has, or never will.
        """
        while rank not in self._born and self._births is not None:
            if not wait([self._births], None if patiently else 0):
                break
            # As they are written: whole. Somebody may look from a signal handler while somebody looks.
            told = os.read(self._births.fileno(), 64 * _BIRTH.size)
            self._born.update(_BIRTH.iter_unpack(told))
            if not told:
                self._births.close()
                self._births = None
        return self._born.get(rank)

    def over(self) -> int | None:
        """How the interpreter ended that forks the ranks; `None` while it is there."""
        code = self._interpreter.exitcode if self._interpreter is not None else 0
        if code is not None and self._adopts:
            # Whom it left behind was adopted when it ended.
            self._adopts = False
            _adopting.end()
        return code

    def stop(self) -> None:
        """Have no more ranks forked. Afterwards it is known who was."""
        if self._interpreter is not None and self.over() is None:
            self._interpreter.kill()
            self._interpreter.join()
            self.over()
        for worker in self.workers:
            # Each has told before it does anything else.
            if isinstance(worker, _Adopted):
                self.born(worker.rank, patiently=True)


def _fresh_interpreter(
    lines: list[Connection], births: Connection, places: list[Place], preparation: dict[str, Any]
) -> Worker:
    """One that has imported nothing yet, and tends."""
    context = multiprocessing.get_context("spawn")
    arguments = (lines, births, places, preparation)
    interpreter = context.Process(target=_tend, args=arguments, name="unlatch-nursery", daemon=False)
    with starting_interpreters(main=False), held_back():
        interpreter.start()
    return interpreter


class _Adopted:
    """A rank that was forked elsewhere, to its launcher."""

    def __init__(self, nursery: Nursery, rank: int) -> None:
        self._nursery, self.rank = nursery, rank
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        return self._nursery.born(self.rank, patiently=True)

    @property
    def exitcode(self) -> int | None:
        if self._code is None:
            # Asked first: who is born after that is not missed.
            over, pid = self._nursery.over(), self._nursery.born(self.rank)
            try:
                if pid is None:
                    self._code = over
                elif (found := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                    self._code = os.waitstatus_to_exitcode(found[1])
            except ChildProcessError:
                # Not adopted yet; or somebody else has asked how it ended, and nobody will know any more.
                self._code = None if over is None else _UNKNOWN
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None and (deadline is None or time.monotonic() < deadline):
            time.sleep(_LOOK)

    def kill(self) -> None:
        self._nursery.stop()
        if self.exitcode is None and (pid := self.pid) is not None:
            # Nobody but the launcher takes it out of the system's list, so this is still its number.
            os.kill(pid, signal.SIGKILL)


class _Adopting:
    """Whether orphans of this process come to it; several starts may want that at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted, self._before = 0, 0

    def begin(self) -> bool:
        """From now on they do. **Returns:** whether this system can."""
        if not sys.platform.startswith("linux"):
            return False
        with self._lock:
            if not self._wanted:
                before = ctypes.c_int()
                if _prctl(_GET_CHILD_SUBREAPER, ctypes.addressof(before)) or _prctl(_SET_CHILD_SUBREAPER, 1):
                    return False
                self._before = before.value
            self._wanted += 1
        return True

    def end(self) -> None:
        """As it was, unless somebody else wants it."""
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                _prctl(_SET_CHILD_SUBREAPER, self._before)


_adopting = _Adopting()


def _prctl(option: int, value: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _name(place: Place) -> str:
    return f"unlatch-rank-{place.rank}"


# ------------------------------------------------------------- in the nursery and in its ranks


def _tend(lines: list[Connection], births: Connection, places: list[Place], preparation: dict[str, Any]) -> None:
    """Import, fork, end."""
    launcher, bound = places[0].parent, places[0].bound
    if bound:
        killed_by_the_kernel()
    if os.getppid() != launcher:
        os._exit(1)
    _import_for_all()
    nursery = os.getpid()
    for number, place in enumerate(places):
        with warnings.catch_warnings():
            # Python is told of threads in numerical libraries, which see to their forks themselves.
            warnings.simplefilter("ignore")
            forked = os.fork()
        if not forked:
            _begin(place, lines[number:], births, nursery, preparation)
        # Who holds it open would hide its end.
        lines[number].close()
    os._exit(0)


def _import_for_all() -> None:
    for name in _NEEDED:
        import_module(name)
    # Torch imports as much again when the first optimizer is made.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def _begin(
    place: Place, lines: list[Connection], births: Connection, nursery: int, preparation: dict[str, Any]
) -> None:
    """Become a rank; does not return."""
    try:
        os.write(births.fileno(), _BIRTH.pack(place.rank, os.getpid()))
        births.close()
        line, *others = lines
        for other in others:
            other.close()
        # Or all would draw the same numbers. Python's own generator sees to that itself.
        np.random.seed()
        torch.default_generator.seed()
        _take_over_main_module({**preparation, "name": _name(place)})
        while os.getppid() == nursery:
            time.sleep(_LOOK)
        serve(line, place)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _take_over_main_module(preparation: dict[str, Any]) -> None:
    """Have what a fresh interpreter would have of the launcher: paths, arguments, folder, main module."""
    own = vars(process.current_process())
    # A script that starts ranks whenever it is imported is told so, instead of doing it again and again.
    own["_inheriting"] = True
    try:
        spawn.prepare(preparation)
    finally:
        del own["_inheriting"]
