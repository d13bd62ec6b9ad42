"""Ranks that stop, sleep or fail on purpose before there is a run, at a given point of its start."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import fault_jobs
from fault_jobs import LIMIT, write_whole
from recording import feed
from small_nets import vectors
from unlatch.errors import ConfigError
from unlatch.methods import Method
from unlatch.train import parallelize

#: Where a run can be disturbed while it starts, in the order in which ranks get there.
POINTS: dict[str, tuple[Any, str]] = {
    "joining": (dist, "init_process_group"),
    "grouping": (dist, "new_group"),
    "shaking hands": (sys.modules[parallelize.__module__], "shake_hands"),
    "planning": (Method, "plan"),
    "connecting": (sys.modules[parallelize.__module__], "connect"),
}


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def doze() -> None:
    time.sleep(3 * LIMIT)


def fail() -> None:
    raise ConfigError("boom at the start")


def start(what: str, point: str, who: int, limit: float = LIMIT) -> None:
    """Start a run while rank `who` is disturbed, and train a little."""
    where, name = POINTS[point]
    original = getattr(where, name)

    def disturbed(*args: Any, **kwargs: Any) -> Any:
        globals()[what]()
        return original(*args, **kwargs)

    chosen = disturbed if int(os.environ["RANK"]) == who else original
    with patch.object(where, name, chosen), fault_jobs.start("dtr", 2, limit=limit) as run:
        feed(run, vectors(3))


if __name__ == "__main__":
    folder, *asked = sys.argv[1:]
    began = time.monotonic()
    text = fault_jobs.reported(start, *asked[:2], int(asked[2]))
    write_whole(Path(folder, f"rank{os.environ['RANK']}"), f"{time.monotonic() - began:.1f} {text}")
    if text != "no error":
        sys.exit(3)
