"""Starts of ranks from an interpreter that has imported already: seconds of CPU time become hundredths.

    tests ---start once---> greenhouse: imports what a nursery imports
      |                        '---forks twice---> nursery: forks ranks, as ever, and ends
      '----adopt---> nursery, ranks

What a nursery does after its imports is the library's own code, in a process that has done nothing but import, as in
earnest. How it comes to its imports is tested where `cold_start` is asked for, and wherever a test starts a program.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from scripts import environment
from unlatch.transport import nursery
from unlatch.transport.rank import Place
from unlatch.transport.signals import held_back

_SIZE = struct.Struct("q")
_NUMBER = struct.Struct("i")
# A message carries no more.
_MOST_OPEN = 253


class Greenhouse:
    """The interpreter that has imported, seen from the process that starts ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> socket.socket:
        """Have it run. **Returns:** the line to it."""
        if self._line is None:
            self._line, theirs = socket.socketpair()
            with theirs, held_back():
                # As multiprocessing does it: the main module of who is forked there has no file.
                self._process = subprocess.Popen(
                    [sys.executable, "-c", f"import greenhouse; greenhouse.serve({theirs.fileno()})"],
                    env=environment(),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
        return self._line

    def interpreter(
        self, lines: list[Connection], births: Connection, places: list[Place], preparation: dict[str, Any]
    ) -> Interpreter:
        """In place of the fresh one that a nursery starts in earnest."""
        open_here = [0, 1, 2, resource_tracker.getfd(), births.fileno(), *(line.fileno() for line in lines)]
        # It refuses to travel by pickle, except to a process that multiprocessing starts.
        plain = {**preparation, "authkey": bytes(preparation["authkey"])}
        asked = pickle.dumps((dict(os.environ), os.getcwd(), places, plain))
        with self._lock:
            line = self.start()
            socket.send_fds(line, [_SIZE.pack(len(asked))], open_here)
            line.sendall(asked)
            [pid] = _NUMBER.unpack(_read(line, _NUMBER.size))
        return Interpreter(pid)

    def close(self) -> None:
        if self._line is not None and self._process is not None:
            self._line.close()
            self._process.wait()


class Interpreter:
    """A child that was adopted, as `multiprocessing` shows its own."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        if self._code is None and (found := os.waitpid(self.pid, os.WNOHANG)) != (0, 0):
            self._code = os.waitstatus_to_exitcode(found[1])
        return self._code

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.005)

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


def serve(number: int) -> None:
    """Fork a nursery for whoever asks, until nobody can any more."""
    nursery._import_for_all()
    with socket.socket(fileno=number) as line:
        while True:
            head, opened, _, _ = socket.recv_fds(line, _SIZE.size, _MOST_OPEN)
            if not head:
                # Nothing here is worth taking apart in good order.
                os._exit(0)
            asked = _read(line, *_SIZE.unpack(head))
            told, tells = os.pipe()
            between = os.fork()
            if not between:
                _become_a_nursery(line, tells, opened, asked)
            os.waitpid(between, 0)
            # Told when it is adopted, so that whoever asks for its exit code gets one.
            line.sendall(os.read(told, _NUMBER.size))
            for one in (told, tells, *opened):
                os.close(one)


def _become_a_nursery(line: socket.socket, tells: int, opened: list[int], asked: bytes) -> None:
    """Be orphaned, so that whoever starts ranks adopts this process; have what it would inherit; tend."""
    between = os.getpid()
    if pid := os.fork():
        os.write(tells, _NUMBER.pack(pid))
        os._exit(0)
    try:
        line.close()
        os.close(tells)
        while os.getppid() == between:
            time.sleep(0.001)
        *standard, tracker, births = opened[:5]
        for number, one in enumerate(standard):
            os.dup2(one, number)
            os.close(one)
        resource_tracker._resource_tracker._fd = tracker
        variables, folder, places, preparation = pickle.loads(asked)
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)
        nursery._tend([Connection(one) for one in opened[5:]], Connection(births, readable=False), places, preparation)
    finally:
        os._exit(1)
