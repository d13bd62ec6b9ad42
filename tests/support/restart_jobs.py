"""Jobs that fail in their first attempts, and say how far they came."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from fault_jobs import NEVER, network
from rank_jobs import Outcome, copied_state
from small_nets import on_plain_nets, vectors
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


class Kills(nn.Module):
    """Kills its process at some training forwards, one for each attempt; later attempts are spared."""

    def __init__(self, at: Sequence[int]) -> None:
        super().__init__()
        self.left = at[0] if at else 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.left:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
        return x


def session(
    method: str, folder: str | None, kills: Sequence[int] = (), callbacks: Sequence[unlatch.callbacks.Callback] = ()
) -> Outcome:
    """Train a fixed number of epochs, from the last checkpoint on if there is one.

    **Arguments:** `kills`: after how many forwards stage 1 dies, in each attempt.
    """
    start = int(os.environ.get("UNLATCH_RESTARTS", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    model = network(2)
    model[1].append(Kills(kills[start:]))
    run = unlatch.parallelize(
        model,
        on_plain_nets(method, 2),
        stages=2,
        loss_fn=mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        split=["1"],
        stall_limit=NEVER,
    )
    with run:
        trainer = unlatch.Trainer(
            run, checkpoints=folder, save_every="3 batches" if folder else None, callbacks=callbacks
        )
        if folder:
            trainer.resume("latest")
        trainer.fit(vectors(10) if 0 in run.stations else None, until=3)
        return {"steps": [], "state": copied_state(run.module())}
