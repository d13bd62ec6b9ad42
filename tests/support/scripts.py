"""Programs in processes of their own: how to start them and what became of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

import unlatch

if TYPE_CHECKING:
    from greenhouse import Greenhouse

SUPPORT = Path(__file__).parent
SOURCE = Path(unlatch.__file__).parents[1]
#: Seconds for what a quiet machine does in a few; a busy one needs many to import torch in every process.
PATIENCE = 240.0
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{SUPPORT}", "OMP_NUM_THREADS": "1"}


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


def run_script(
    folder: Path, text: str, *launcher: str, greenhouse: Greenhouse | None = None
) -> subprocess.CompletedProcess[str]:
    """**Arguments:** `greenhouse`: where it has imported already; for tests that are about what comes later."""
    script = folder / "script.py"
    script.write_text(text)
    run = run_python if greenhouse is None else greenhouse.completed
    return run(*launcher, str(script), str(folder))


def runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting for whoever inherited it to take notice of its end."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)
