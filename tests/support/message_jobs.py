"""Runs whose messages are rounded: here, on ranks, saved and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import unlatch
from order_jobs import begun, data
from rank_jobs import Outcome as Conv
from rank_jobs import train_conv
from resume_jobs import SAVED_AT, Outcome, ended, feed

#: One case for each kind of order, station and message.
CASES = ("1f1b", "pipedream", "dtrp", "layerpipe", "auxnet", "auxnet replay")
#: What stands for each family of stations on images, with short batches and, for most, micro-batches.
ON_IMAGES = ("1f1b", "zb-h1", "pipedream", "dtrp", "dgl", "dni", "petra")


def trained(case: str, messages: str, path: str | None = None, distributed: bool | None = None) -> Outcome:
    """Train on; save after some batches, if there is a place for it."""
    with begun(case, 1, distributed, messages=messages) as run:
        feed(run, 0, SAVED_AT)
        if path is not None:
            run.save(path)
        return ended(run)


def continued(case: str, messages: str, path: str, distributed: bool | None = None) -> Outcome:
    """Load what `trained` saved into a run that has seen other data, and train on."""
    with begun(case, 1, distributed, messages=messages) as run:
        for x, y in data()[:2]:
            run.step(x + 1, y)
        run.load(path)
        return ended(run)


def both_everywhere(folder: str, messages: str) -> dict[str, tuple[Outcome, Outcome]]:
    """The cases on the ranks of this process group: never stopped, and continued. Weights of the network only."""
    found = {}
    for case in CASES:
        path = str(Path(folder, case.replace(" ", "_")))
        one, other = trained(case, messages, path), continued(case, messages, path)
        found[case] = (one[0], one[1][:8]), (other[0], other[1][:8])
    return found


def on_images(messages: str) -> dict[str, Conv]:
    return {method: train_conv(method, 3, messages=messages) for method in ON_IMAGES}


def wide_run(messages: str, width: int = 256, transport: str = "auto") -> unlatch.Run:
    """Two stages with a state of so many numbers per sample between them."""
    torch.manual_seed(0)
    return unlatch.parallelize(
        nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4)),
        "pipedream",
        stages=2,
        split=["2"],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        messages=messages,
        transport=transport,  # type: ignore[arg-type]
    )


def bytes_sent(formats: tuple[str, ...], batches: int, transport: str) -> dict[str, list[int]]:
    """By format, what each rank has sent."""
    found: dict[str, Any] = {}
    for messages in formats:
        with wide_run(messages, transport=transport) as run:
            for _ in range(batches):
                run.step(torch.ones(64, 8), torch.zeros(64, 4))
            run.flush()
            found[messages] = [stage.bytes_sent for stage in run.statistics()]
    return found
