"""What ranks tell of how they were started."""

from __future__ import annotations

import multiprocessing
import os
import random

import numpy as np
import psutil
import torch


def origin() -> tuple[int, str, str]:
    """Parent, name and a setting of this process."""
    return os.getppid(), multiprocessing.current_process().name, os.environ.get("UNLATCH_TEST_SETTING", "")


def drawn() -> tuple[float, int, int]:
    """Numbers of generators that nobody has seeded."""
    return random.random(), int(np.random.randint(2**31)), int(torch.randint(2**31, ()))


def open_lines() -> int:
    """Connections of this process to others that are no network connections: to the launcher, and what that has."""
    return len(psutil.Process().net_connections(kind="unix"))
