"""Runs of a language model with tied embeddings and of a network with skips: here, on ranks, saved and continued."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

import unlatch
from tied_nets import WIDTH, SmallUNet, TiedLM, padded, token_sum
from unlatch.methods import get
from unlatch.methods.auxnet.border import BorderMethod

#: Every method that takes more than one tensor between stages: all but those that predict what is there.
METHODS = [name for name in unlatch.methods.names() if not isinstance(get(name), BorderMethod)]
SAVED_AT = 4

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def begun(method: str, net: str, distributed: bool | None) -> unlatch.Run:
    """A run of three stages (devices, where tasks are placed)."""
    torch.manual_seed(0)
    log = logging.getLogger("unlatch")
    level = log.level
    # Limits of stability are not the subject here.
    log.setLevel(logging.ERROR)
    planned = method == "layerpipe"
    split = ["layers.0", "head"] if net == "tied" else ["middle", "up.1"]
    try:
        return unlatch.parallelize(
            TiedLM() if net == "tied" else SmallUNet(),
            # Nothing here can be computed back.
            get(method, store=(0, 1)) if method == "petra" else method,
            stages=3,
            loss_fn=token_sum if net == "tied" else mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9),
            # Costs that are measured would place tasks differently in each process that is compared.
            **({} if planned else {"split": split, "sample": data(net)[0]}),
            distributed=distributed,
        )
    finally:
        log.setLevel(level)


def data(net: str) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    pair = [(torch.randn(6, WIDTH, generator=generator), torch.randn(6, WIDTH, generator=generator)) for _ in range(9)]
    return padded(9, 6) if net == "tied" else pair


def trained(method: str, net: str, folder: str | None = None, distributed: bool | None = None) -> Outcome:
    """Losses and weights; on the way a checkpoint, if there is a folder for it."""
    with begun(method, net, distributed) as run:
        losses = []
        for number, batch in enumerate(data(net)):
            if number == SAVED_AT and folder is not None:
                run.save(Path(folder, f"{method}-{net}"))
            losses.append(run.step(*batch).loss)
        return _ended(run, losses)


def continued(method: str, net: str, folder: str, distributed: bool | None = None) -> Outcome:
    """The same from the checkpoint."""
    with begun(method, net, distributed) as run:
        run.load(Path(folder, f"{method}-{net}"))
        return _ended(run, [run.step(*batch).loss for batch in data(net)[SAVED_AT:]])


def _ended(run: unlatch.Run, losses: list[float | None]) -> Outcome:
    losses += [result.loss for result in run.flush()]
    weights = {name: t.detach().clone() for name, t in run.module().state_dict().items()}
    return [loss for loss in losses if loss is not None], weights


def trained_and_continued(net: str, folder: str) -> dict[str, tuple[Outcome, Outcome]]:
    """All methods, on the ranks of this process group."""
    return {method: (trained(method, net, folder), continued(method, net, folder)) for method in METHODS}
