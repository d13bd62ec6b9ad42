"""Programs that torchrun starts on several hosts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import fault_jobs
import unlatch
from fault_jobs import LIMIT, write_whole
from message_jobs import wide_run
from rank_jobs import Outcome, copied_state, train_conv
from recording import feed
from restart_jobs import session
from small_nets import vectors

STAGES = 3
#: What is trained where a rank dies after so many forwards, once in each start.
METHOD, KILLS = "dtrp", [8, 11]
#: Per second, of a slow link.
MEGABITS = 25


def every_method() -> dict[str, Outcome]:
    """What each method makes of the same model and data."""
    return {method: train_conv(method, STAGES) for method in unlatch.methods.names()}


def over_a_slow_link() -> dict[str, Outcome]:
    """By format of messages: states of 1 MB between two stages, what was sent, and how long that took."""
    found = {}
    for messages in ("exact", "int8"):
        began = time.perf_counter()
        with wide_run(messages, width=1024) as run:
            steps = [run.step(torch.randn(256, 8), torch.zeros(256, 4)) for _ in range(3)] + run.flush()
            sent = [stage.bytes_sent for stage in run.statistics()]
            state = copied_state(run.module())
        losses = [(step.batch, step.loss) for step in steps]
        found[messages] = {"steps": losses, "state": state, "sent": sent, "seconds": time.perf_counter() - began}
    return found


def train(folder: Path) -> None:
    """Until somebody ends it; says so once training is under way, and what ended it."""
    rank = int(os.environ["RANK"])
    try:
        with fault_jobs.start("dtr", STAGES, limit=LIMIT) as run:
            feed(run, vectors(5))
            write_whole(folder / f"pid{rank}", str(os.getpid()))
            while True:
                feed(run, vectors(5))
    except unlatch.errors.UnlatchError as error:
        write_whole(folder / f"error{rank}", f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, place = sys.argv[1], Path(sys.argv[2])
    if what == "train":
        train(place)
    elif what == "slow link":
        torch.save(over_a_slow_link(), place / os.environ["RANK"])
    elif what == "session":
        torch.save(session(METHOD, str(place / "checkpoints"), KILLS), place / os.environ["RANK"])
    else:
        torch.save(every_method(), place / os.environ["RANK"])
