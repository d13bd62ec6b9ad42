"""Runs that are saved with batches under way and continued: on ranks, in one process, by other methods."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
    trained = [one for s in run.stations.values() for one in s.trained().values()]
    return losses, weights + [t.detach().clone() for one in trained for t in one.module.parameters()]


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


def place(folder: str | Path, case: str, accumulate: int = 1) -> str:
    return str(Path(folder, f"{case}-{accumulate}".replace(" ", "_")))


def unbroken_everywhere(folder: str, accumulate: int = 1) -> dict[str, Outcome]:
    """All cases on the ranks of this process group, saved under way. **Returns:** losses and weights of the network."""
    outcomes = {case: unbroken(case, accumulate, place(folder, case, accumulate)) for case in _cases(accumulate)}
    torch.save(outcomes, _noted(folder))
    return {case: network(outcome) for case, outcome in outcomes.items()}


def differing(folder: str, accumulate: int = 1) -> list[str]:
    """Continue what `unbroken_everywhere` saved, on the same ranks.

    **Returns:** the cases that do not go on as if never stopped, in what a rank has beside the network too.
    """
    expected = torch.load(_noted(folder))
    assert expected.keys() == set(_cases(accumulate))
    return [
        case
        for case, outcome in expected.items()
        if not same(outcome, continued(case, accumulate, place(folder, case, accumulate)))
    ]


def continued_everywhere(folder: str) -> dict[str, Outcome]:
    """What comes of the checkpoints that were written in one process, here."""
    return {case: network(continued(case, 1, place(folder, case))) for case in CASES}


def differing_over(transport: str, cases: Sequence[str], folder: str) -> list[str]:
    """The cases that do not go on as if never stopped where messages take this way between ranks."""
    wrong = []
    for case in cases:
        path = place(folder, case)
        with begun(case, transport=transport) as run:
            feed(run, 0, SAVED_AT)
            run.save(path)
            expected = ended(run)
        with begun(case, transport=transport) as run:
            feed(run, 1, 2)
            run.load(path)
            if not same(expected, ended(run)):
                wrong.append(case)
    return wrong


def _cases(accumulate: int) -> list[str]:
    return [case for case in CASES if accumulate == 1 or accumulates(case)]


def _noted(folder: str) -> Path:
    return Path(folder, f"outcomes{os.environ['RANK']}")


def network(outcome: Outcome) -> Outcome:
    """Without what a method trains beside it, of which a rank has its own part only."""
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
