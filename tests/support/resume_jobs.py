"""Runs that are saved with batches under way and continued: on ranks, in one process, by other methods."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import StepLR

import unlatch
from order_jobs import CASES, accumulates, begun, data

SCHEDULER = partial(StepLR, step_size=2, gamma=0.7)
SAVED_AT, MORE = 5, 6

Outcome = tuple[list[float], list[torch.Tensor]]


def feed(run: unlatch.Run, first: int, count: int) -> list[float]:
    batches = data()
    results = [run.step(*batches[number % len(batches)]) for number in range(first, first + count)]
    return [r.loss for r in results if r.loss is not None]


def ended(run: unlatch.Run) -> Outcome:
    """Some more batches and the rest of the pipeline: losses and weights, those beside the network included."""
    losses = feed(run, SAVED_AT, MORE) + [r.loss for r in run.flush() if r.loss is not None]
    weights = [t.clone() for t in run.module().state_dict().values()]
    beside = [
        t.clone() for s in run.stations.values() for name in s.trained() for t in s.trained()[name].module.parameters()
    ]
    return losses, weights + beside


def unbroken(case: str, accumulate: int, path: str | None, distributed: bool | None = None) -> Outcome:
    """Train on; save after some batches, if there is a place for it."""
    with begun(case, accumulate, distributed, lr_scheduler=SCHEDULER) as run:
        feed(run, 0, SAVED_AT)
        if path is not None:
            run.save(path, wait=accumulate > 1)
        return ended(run)


def continued(case: str, accumulate: int, path: str, distributed: bool | None = None) -> Outcome:
    """Load what `unbroken` saved into a run that has seen other data, and train on."""
    with begun(case, accumulate, distributed, lr_scheduler=SCHEDULER) as run:
        for x, y in data()[:2]:
            run.step(x + 1, y)
        run.load(path)
        return ended(run)


def same(one: Outcome, other: Outcome) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def broken_everywhere(folder: str, accumulate: int) -> list[str]:
    """All cases on the ranks of this process group. **Returns:** those that do not go on as if never stopped."""
    wrong = []
    for case in CASES:
        if accumulate == 1 or accumulates(case):
            path = str(Path(folder, f"{case}-{accumulate}".replace(" ", "_")))
            if not same(unbroken(case, accumulate, path), continued(case, accumulate, path)):
                wrong.append(case)
    return wrong


def continued_everywhere(folder: str) -> dict[str, Any]:
    """What comes of the checkpoints that were written in one process, here; weights of the network only."""
    return {case: _network(continued(case, 1, str(Path(folder, case.replace(" ", "_"))))) for case in CASES}


def unbroken_everywhere(folder: str) -> dict[str, Any]:
    """Checkpoints for one process, written here, and what comes of the runs."""
    return {case: _network(unbroken(case, 1, str(Path(folder, case.replace(" ", "_"))))) for case in CASES}


def _network(outcome: Outcome) -> Outcome:
    return outcome[0], outcome[1][:8]


def image_run(seed: int) -> unlatch.Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten())
    return unlatch.parallelize(
        model.to(memory_format=torch.channels_last),
        "pipedream",
        stages=2,
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        split=["2"],
    )


def feed_images(run: unlatch.Run, first: int, count: int) -> list[float | None]:
    generator = torch.Generator().manual_seed(first)
    losses = []
    for _ in range(count):
        x = torch.randn(4, 3, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        losses.append(run.step(x, torch.randn(4, 512, generator=generator)).loss)
    return losses
