"""What ranks tell of how they were started."""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np
import psutil


def origin() -> tuple[int, str, str]:
    """Parent, name and a setting of this process."""
    return os.getppid(), multiprocessing.current_process().name, os.environ.get("UNLATCH_TEST_SETTING", "")


def drawn() -> tuple[int, int]:
    """Numbers that nobody has seeded: of numpy, and of the system."""
    return int(np.random.randint(2**31)), int.from_bytes(os.urandom(4), "little")


def open_lines() -> int:
    """Connections of this process to others that are no network connections: to the launcher, and what that has."""
    return len(psutil.Process().net_connections(kind="unix"))


def main_module() -> tuple[str, bool]:
    """The main module as this process has it, and whether the library was there before it."""
    main = sys.modules["__main__"]
    return main.__name__, main is sys.modules.get("__mp_main__")
