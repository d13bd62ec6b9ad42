"""Training with compiled stages: batch norm, dropout and a short batch show what compiling may get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import unlatch
from rank_jobs import copied_state, momentum_sgd
from small_nets import CONV_SPLITS, conv_net, images, on_plain_nets

Outcome = tuple[list[float], dict[str, Tensor]]
#: Whole batches, a short one amid them, and so many before a checkpoint.
SIZES, SAVED_AT = (12, 12, 12, 7, 12, 12, 12), 4
#: No compiler is needed: graphs are taken apart into forward and backward, and run by torch's own kernels.
BACKEND = "aot_eager"


def begun(method: str, stages: int = 3, microbatches: int = 1, **options: Any) -> unlatch.Run:
    return unlatch.parallelize(
        conv_net(),
        on_plain_nets(unlatch.methods.get(method, microbatches=microbatches), stages),
        stages=stages,
        loss_fn=cross_entropy,
        optimizer=momentum_sgd,
        split=CONV_SPLITS[stages],
        sample=images([12])[0],
        **{"compile": BACKEND, **options},
    )


def ended(run: unlatch.Run, first: int = 0) -> Outcome:
    steps = [run.step(x, y) for x, y in images(list(SIZES))[first:]] + run.flush()
    return [s.loss for s in steps if s.loss is not None], copied_state(run.module())


def trained(method: str, path: str | None = None, **options: Any) -> Outcome:
    """Train on, and save on the way; tell of what came after."""
    with begun(method, **options) as run:
        first = 0
        if path is not None:
            for x, y in images(list(SIZES))[:SAVED_AT]:
                run.step(x, y)
            run.save(path)
            first = SAVED_AT
        return ended(run, first)


def resumed(method: str, path: str, **options: Any) -> Outcome:
    with begun(method, **options) as run:
        run.load(path)
        return ended(run, SAVED_AT)


def same(one: Outcome, other: Outcome) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][key], other[1][key]) for key in one[1])


def everywhere(methods: tuple[str, ...], folder: str) -> dict[str, list[Outcome]]:
    """Each method begun with a checkpoint on the way, and taken up from there; on whatever ranks there are."""
    found = {}
    for method in methods:
        path = f"{folder}/{method}"
        found[method] = [trained(method, path), resumed(method, path)]
    return found
