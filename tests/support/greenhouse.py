"""Ranks and programs from an interpreter that has imported already: seconds of CPU time become hundredths.

    tests ---start once---> greenhouse: imports what a nursery imports
      |                        '---forks twice---> nursery: forks ranks, as ever, and ends; or a program
      '----adopt---> nursery, ranks, programs

What runs after the imports is the code under test, in a process that has done nothing but import, as in earnest. How a
nursery or a program comes to its imports is tested where `cold_start` is asked for, and wherever a test runs Python
itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from scripts import PATIENCE, environment
from unlatch.transport import nursery
from unlatch.transport.rank import Place, killed_by_the_kernel
from unlatch.transport.signals import REQUESTS, held_back

_SIZE = struct.Struct("q")
#: Process ids of who was forked and of its own greenhouse, 0 for none.
_BORN = struct.Struct("ii")
# A message carries no more.
_MOST_OPEN = 253


class Greenhouse:
    """The interpreter that has imported, seen from the process that it forks for.

    **Arguments:** `line`: to one that runs already.
    """

    def __init__(self, line: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._line = line
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Have it run. **Returns:** the line to it."""
        if self._line is None:
            self._line, theirs = socket.socketpair()
            with theirs, held_back():
                # As multiprocessing does it: the main module of who is forked there has no file.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"import greenhouse; greenhouse.grow({theirs.fileno()})"],
                    env=environment(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        return self._line

    def interpreter(
        self, lines: list[Connection], births: Connection, places: list[Place], preparation: dict[str, Any]
    ) -> Adopted:
        """In place of the fresh one that a nursery starts in earnest."""
        # It refuses to travel by pickle, except to a process that multiprocessing starts.
        plain = {**preparation, "authkey": bytes(preparation["authkey"])}
        more = [resource_tracker.getfd(), births.fileno(), *(line.fileno() for line in lines)]
        return self._fork(_tend, (places, plain), os.environ, [0, 1, 2, *more])

    def program(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        output: int,
        errors: int,
        network: str | None = None,
    ) -> Adopted:
        """`python ARGUMENTS` in a session of its own: signals to its group stay there.

        **Arguments:** `network`: the namespace that it runs in, by name.
        """
        nursery._adopting.begin()
        try:
            return self._fork(_run, (list(arguments), network), variables, [0, output, errors])
        finally:
            nursery._adopting.end()

    def completed(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What a program has come to."""
        with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
            program = self.program(arguments, environment(), output.fileno(), errors.fileno())
            try:
                code = program.wait(PATIENCE)
            finally:
                program.kill()
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(arguments, code, output.read(), errors.read())

    def _fork(self, what: Any, details: tuple[Any, ...], variables: Mapping[str, str], opened: list[int]) -> Adopted:
        asked = pickle.dumps((what, details, dict(variables), os.getcwd()))
        with self._lock:
            line = self.start()
            socket.send_fds(line, [_SIZE.pack(len(asked))], opened)
            line.sendall(asked)
            pid, copy = _BORN.unpack(_read(line, _BORN.size))
        if not pid:
            raise ChildProcessError(f"{what.__name__}{details} failed before it was born")
        return Adopted(pid, copy)

    def close(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait()


class Adopted:
    """A child that was forked elsewhere, as `multiprocessing` and `subprocess` show their own."""

    def __init__(self, pid: int, greenhouse: int) -> None:
        #: `greenhouse` is the child from which a program has its ranks.
        self.pid, self.greenhouse = pid, greenhouse
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG)) != (0, 0):
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.poll() is None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.005)

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)


def _read(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        more = line.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


# ------------------------------------------------------------- in the greenhouse


def grow(number: int) -> None:
    """Import, and fork for whoever asks. Returns in a program that has come to its end."""
    # What the command line trains on by default.
    with contextlib.suppress(ImportError):
        import sklearn.datasets  # noqa: F401
    nursery._import_for_all()
    # Programs would spend a second each on looking through all of it when they end.
    gc.freeze()
    _serve(socket.socket(fileno=number))


def _serve(line: socket.socket) -> None:
    while True:
        head, opened, _, _ = socket.recv_fds(line, _SIZE.size, _MOST_OPEN)
        if not head:
            # Nothing here is worth taking apart in good order.
            os._exit(0)
        asked = _read(line, *_SIZE.unpack(head))
        told, tells = os.pipe()
        between = os.fork()
        if not between:
            _be_adopted()
            line.close()
            os.close(told)
            what, details, variables, folder = pickle.loads(asked)
            # What a process inherits.
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(folder)
            what(tells, opened, *details)
            return
        os.waitpid(between, 0)
        os.close(tells)
        # Nobody is born if it fails before, and whoever asks would wait for ever.
        line.sendall(os.read(told, _BORN.size) or _BORN.pack(0, 0))
        for one in (told, *opened):
            os.close(one)


def _be_adopted() -> None:
    """Go on as an orphan, and thus as a child of whoever has asked."""
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.001)


def _tend(tells: int, opened: list[int], places: list[Place], preparation: dict[str, Any]) -> None:
    """Be a nursery; does not return."""
    try:
        _born(tells)
        _use(opened[:3])
        tracker, births, *lines = opened[3:]
        resource_tracker._resource_tracker._fd = tracker
        nursery._tend(list(map(Connection, lines)), Connection(births, readable=False), places, preparation)
    finally:
        os._exit(1)


def _run(tells: int, opened: list[int], arguments: list[str], network: str | None) -> None:
    """Be a program. What it starts comes from a copy of the greenhouse that is forked before it does anything."""
    os.setsid()
    if network is not None:
        _enter(network)
    ours, theirs = socket.socketpair()
    program = os.getpid()
    if not (copy := os.fork()):
        ours.close()
        killed_by_the_kernel()
        if os.getppid() == program:
            for one in (tells, *opened):
                os.close(one)
            _serve(theirs)
        os._exit(0)
    theirs.close()
    _born(tells, copy)
    _use(opened)
    own = Greenhouse(ours)
    nursery._fresh_interpreter = own.interpreter
    # A background job would start deaf to it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        if sys.argv[0] == "torch.distributed.run":
            _let_torchrun_start(own)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(sys.argv[0]).parent))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _enter(network: str) -> None:
    new_network = 0x40000000
    with Path("/var/run/netns", network).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), new_network):
            raise OSError(ctypes.get_errno(), f"cannot enter the network {network}")


def _let_torchrun_start(own: Greenhouse) -> None:
    """Its ranks have imported already as well."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    def popen(handler: Any, command: tuple[str, ...], variables: dict[str, str]) -> Adopted:
        assert command[0] == sys.executable
        opened = [1 if handler._stdout is None else handler._stdout.fileno()]
        opened += [2 if handler._stderr is None else handler._stderr.fileno()]
        return own.program(command[1:], variables, *opened)

    SubprocessHandler._popen = popen


def _born(tells: int, greenhouse: int = 0) -> None:
    os.write(tells, _BORN.pack(os.getpid(), greenhouse))
    os.close(tells)


def _use(standard: list[int]) -> None:
    for number, one in enumerate(standard):
        os.dup2(one, number)
        os.close(one)
