"""Jobs that fail in their first attempts, and say how far they came."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch.distributed as dist

from unlatch.errors import ConfigError
from unlatch.transport.reports import report_progress


def fail(what: str) -> None:
    match what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise OSError("the disk is gone")
        case "settings":
            raise ConfigError("lr must be positive")
        case "exit":
            sys.exit(3)


def fails(what: str, attempts: int, saves: list[int]) -> tuple[int, Any]:
    """Fail on rank 1, in so many attempts, each time after a checkpoint if there is one left.

    **Returns:** which start this one is, and what the ranks exchanged: they can.
    """
    start, rank = int(os.environ["UNLATCH_RESTARTS"]), dist.get_rank()
    if rank == 0 and start < len(saves):
        report_progress(saves[start])
    # So that what rank 0 reports is heard before rank 1 fails.
    dist.barrier()
    if rank == 1 and start < attempts:
        fail(what)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rank)
    return start, found
