"""Runs that are fed batches which are not finite, and leave them out: inline, and on the ranks of a process group."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch.optim.lr_scheduler import StepLR

import unlatch
from order_jobs import accumulates, begun, data
from unlatch.train import guard

BATCHES = 15
#: Which batches are bad: at the start, alone, two in a row, at the very end.
BAD = (0, 6, 9, 10, BATCHES - 1)

#: Cases of every family.
SOME = (
    "bp",
    "gpipe",
    "1f1b",
    "pipedream",
    "dtrp",
    "petra",
    "layerpipe",
    "layerpipe stages",
    "auxnet",
    "auxnet replay",
    "auxvar",
    "dgl",
)

Batch = tuple[torch.Tensor, torch.Tensor]
Outcome = tuple[list[float], list[torch.Tensor]]


def spoiled(kind: str, batch: Batch) -> Batch:
    """A batch whose loss is NaN; or one whose loss is fine but whose gradient at the first layer is not."""
    x, y = batch[0].clone(), batch[1].clone()
    if kind == "loss":
        y[0, 0] = torch.nan
    else:
        x[0, 0] = torch.inf
    return x, y


def fed(kind: str | None, bad: Sequence[int] = BAD) -> list[Batch]:
    """All batches, some of them spoiled; or only the good ones."""
    good = data()
    chosen = [good[number % len(good)] for number in range(BATCHES)]
    if kind is None:
        return [batch for number, batch in enumerate(chosen) if number not in bad]
    return [spoiled(kind, batch) if number in bad else batch for number, batch in enumerate(chosen)]


@contextmanager
def keeping_often() -> Iterator[None]:
    """States are kept as often as they may be, so that short runs meet every case; nothing is logged."""
    interval, guard._INTERVAL = guard._INTERVAL, 1
    log = logging.getLogger("unlatch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        guard._INTERVAL = interval
        log.setLevel(level)


def trained(case: str, accumulate: int, kind: str | None, distributed: bool | None = None) -> tuple[Outcome, int]:
    """Losses and weights, those beside the network included, and how many batches were left out."""
    scheduler = partial(StepLR, step_size=2, gamma=0.9)
    with (
        keeping_often(),
        begun(case, accumulate, distributed, lr_scheduler=scheduler, nonfinite="skip") as run,
    ):
        results = [run.step(x, y) for x, y in fed(kind)] + run.flush()
        losses = [r.loss for r in results if r.loss is not None]
        weights = [t.clone() for t in run.module().state_dict().values()]
        nets = [t.module for s in run.stations.values() for t in s.trained().values()]
        return (losses, weights + [p.detach().clone() for net in nets for p in net.parameters()]), run.left_out


def same_weights(one: Outcome, other: Outcome) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def contains(losses: list[float], expected: list[float]) -> bool:
    """Whether all expected losses were told in their order; a batch may be told before it is found to be bad."""
    left = iter(losses)
    return all(any(loss == wanted for loss in left) for wanted in expected)


def wrong_ones(cases: Iterable[str], kind: str, accumulate: int = 1, distributed: bool | None = None) -> list[str]:
    """Cases that do not end as if the bad batches had never been fed."""
    wrong = []
    for case in cases:
        if accumulate > 1 and not accumulates(case):
            continue
        found, left_out = trained(case, accumulate, kind, distributed)
        expected, _ = trained(case, accumulate, None, distributed)
        # A rank that is ahead of the one that finds a bad gradient tells losses that do not count in the end.
        told = (kind == "gradient" and distributed is None) or contains(found[0], expected[0])
        if left_out != len(BAD) or not same_weights(found, expected) or not told:
            wrong.append(f"{case}: {left_out} left out")
    return wrong


# ------------------------------------------------------------------------ sessions


def session(case: str, kind: str | None, folder: str, policy: str, bad: Sequence[int] = BAD) -> unlatch.Run:
    """A run, fitted for two epochs with evaluations and checkpoints; the bad batches are in both."""
    with keeping_often(), begun(case, nonfinite=policy) as run:
        trainer = unlatch.Trainer(run, folder, save_every="4 batches")
        trainer.resume()
        trainer.fit(fed(kind, bad), until=2, eval_loader=data()[:1])
        run.module()
        return run


def weights(run: unlatch.Run) -> list[torch.Tensor]:
    return [t.clone() for t in run._model.state_dict().values()]


def sessions_everywhere(cases: Sequence[str], folder: str) -> list[str]:
    """Cases whose sessions do not end as if the bad batches had never been there."""
    wrong = []
    for case in cases:
        found = session(case, "gradient", f"{folder}/{case}", "skip")
        expected = session(case, None, f"{folder}/{case} good", "skip")
        same = all(torch.equal(a, b) for a, b in zip(weights(found), weights(expected), strict=True))
        if not same or found.left_out != 2 * len(BAD):
            wrong.append(f"{case}: {found.left_out}")
    return wrong


def stopped(case: str, kind: str, folder: str) -> str:
    """What a session that meets a bad batch in the middle of its first pass raises."""
    try:
        session(case, kind, folder, "stop", bad=[9])
    except unlatch.errors.UnlatchError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def gone_on(case: str, folder: str) -> list[torch.Tensor]:
    """Weights of a session that goes on from a folder, if there is something in it, with good data."""
    return weights(session(case, None, folder, "stop", bad=[]))
