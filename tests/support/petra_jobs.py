"""PETRA on ranks: jobs with everything a distributed run could get wrong, returning all that must not depend on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import unlatch
from rank_jobs import Outcome, copied_state, falling_lr
from unlatch.models import build
from unlatch.models.revnet import RevNet

#: Blocks of the small copies of RevNet-18 and RevNet-34: 10 and 18, of which 4 below the head store their inputs.
COUNTS = {10: (2, 2, 2, 2), 18: (3, 4, 6, 3)}
sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3)


def revnet(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    if blocks in COUNTS:
        return RevNet(COUNTS[blocks], width=2, classes=4, in_channels=1, stem="small")
    # Eight channels: torch's own backward of 1x1 convolutions of stride 2 crashes on four in channels_last.
    net = build("revnet14", width=8, classes=4, in_channels=1)
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train_revnet(method: Any, stages: int, blocks: int = 8, sizes: tuple[int, ...] = (8,) * 6 + (5,)) -> Outcome:
    """Train a RevNet with a falling learning rate, an evaluation on the way and a short last batch."""
    generator = torch.Generator().manual_seed(1)
    layout = torch.contiguous_format if blocks in COUNTS else torch.channels_last
    data = [
        (
            torch.randn(n, 1, 8, 8, generator=generator).contiguous(memory_format=layout),
            torch.randint(4, (n,), generator=generator),
        )
        for n in sizes
    ]
    with unlatch.parallelize(
        revnet(blocks),
        method,
        stages=stages,
        loss_fn=nn.functional.cross_entropy,
        optimizer=sgd,
        lr_scheduler=falling_lr,
        seed=3,
    ) as run:
        steps, evaluations = [], []
        for number, (x, y) in enumerate(data):
            steps.append(run.step(x, y))
            if number == 3:
                evaluations.append(run.evaluate(data[:2]))
        steps += run.flush()
        evaluations.append(run.evaluate(data[:2]))
        found = run.statistics()
        state = copied_state(run.module())
    return {
        "steps": [(s.step, s.batch, s.loss) for s in steps],
        "evaluations": evaluations,
        "reconstruction": [s.reconstruction for s in found],
        # The graph of the last stage holds targets, which inline are parts of a larger tensor.
        "stored": [s.stored_bytes for s in found[:-1]],
        "delays": [(s.in_flight, s.delay, s.staleness) for s in found],
        "state": state,
    }


def train_each(jobs: list[tuple[Any, int, int]]) -> list[Outcome]:
    return [train_revnet(*job) for job in jobs]
