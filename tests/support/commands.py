"""The command line in a session of its own: signals to its group stay there, and what is left behind is found."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil
from safetensors.torch import load_file

from greenhouse import Adopted, Greenhouse
from scripts import PATIENCE, environment, runs, wait_until
from unlatch.io.checkpoints import Checkpoints

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Command:
    """`unlatch ...` in the folder of the test.

    **Arguments:**

    - `launcher`: what Python runs in place of `-m unlatch`.
    - `greenhouse`: where it has imported already; for tests that are about what comes later.
    """

    def __init__(
        self,
        *arguments: object,
        launcher: tuple[str, ...] = ("-m", "unlatch"),
        greenhouse: Greenhouse | None = None,
    ) -> None:
        command = [*launcher, *map(str, arguments)]
        variables = {**environment(), "COLUMNS": "120", "NO_COLOR": "1"}
        with Path("said.txt").open("w") as file:
            self.process: subprocess.Popen[bytes] | Adopted
            if greenhouse is not None:
                self.process = greenhouse.program(command, variables, file.fileno(), file.fileno())
            else:
                self.process = _started(command, variables, file)

    def said(self) -> str:
        """All that it has said so far."""
        return Path("said.txt").read_text()

    def wait_until_it_says(self, text: str) -> None:
        self.wait_until(lambda: re.search(text, self.said()) is not None, f"it never says {text!r}")

    def wait_until_it_imports(self, library: str) -> None:
        """Wait for a library in the memory of the process, which shows how far it has come before it says anything."""
        self.wait_until(lambda: library in Path(f"/proc/{self.process.pid}/maps").read_text(), f"no {library}")

    def wait_until(self, done, otherwise: str) -> None:
        wait_until(lambda: self.process.poll() is not None or done(), otherwise)
        assert self.process.poll() is None, self.said()

    def ranks(self) -> list[int]:
        """The processes that it has started to train, in order."""
        children = psutil.Process(self.process.pid).children()
        if isinstance(self.process, Adopted):
            others = ("resource_tracker", "unlatch.live")
            mine = [child for child in children if child.pid != self.process.greenhouse]
            return [child.pid for child in mine if not any(part in " ".join(_command_line(child)) for part in others)]
        return [child.pid for child in children if any("spawn_main" in part for part in _command_line(child))]

    def send(self, number: int, target: str) -> None:
        if target == "group":
            os.killpg(self.process.pid, number)
        else:
            os.kill(self.process.pid if target == "launcher" else self.ranks()[-1], number)

    def ended(self) -> tuple[int, str]:
        """Wait for the end of it and of all that it started. **Returns:** the exit code and what was said."""
        self.process.wait(PATIENCE)
        wait_until(lambda: not self._members(), "processes are left behind")
        return self.process.returncode, self.said()

    def _members(self) -> list[int]:
        return [pid for pid in psutil.pids() if _session(pid) == self.process.pid and runs(pid)]

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


def _started(command: list[str], variables: dict[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    # A background job starts deaf to SIGINT, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *command], env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def latest(run: str | Path) -> Path | None:
    """The newest checkpoint of a run."""
    return Checkpoints(Path(run) / "checkpoints").latest()


def same_weights(one: str | Path, other: str | Path) -> bool:
    """Whether two runs have ended with the same weights, bit for bit."""
    found, expected = (load_file(latest(run) / "model.safetensors") for run in (one, other))
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


def _command_line(process: psutil.Process) -> list[str]:
    """Empty once it has ended, as the one that started the others has."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []
