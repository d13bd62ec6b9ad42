"""Sessions on ranks that are killed again and again, at any moment, and come back from their last checkpoint."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from unlatch.methods import get

#: Method, options, and whether blocks are reversible.
METHODS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "bp": ("bp", {}, False),
    "pipedream": ("pipedream", {}, False),
    "dtrp": ("dtrp", {}, False),
    "petra": ("petra", {}, True),
    "layerpipe stages": ("layerpipe", {"mode": "stages"}, False),
    "layerpipe tasks": ("layerpipe", {"mode": "atomic"}, False),
    "auxnet": ("auxnet", {}, False),
}
# Long enough that a session outlives all its kills.
EPOCHS, BATCHES = 20, 50


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(BATCHES)]


def begun(name: str) -> unlatch.Run:
    method, options, reversible = METHODS[name]
    torch.manual_seed(0)
    if reversible:
        halves = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)]
        model = nn.Sequential(*[unlatch.nn.Coupling(half) for half in halves])
    else:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
    chosen = get(method, **options)
    planned = method == "layerpipe" and options["mode"] != "stages"
    # Costs that are measured would place tasks differently in each start.
    cut = {} if planned else {"split": ["2"], "sample": paired(data()[0]) if reversible else data()[0]}
    return unlatch.parallelize(
        model,
        chosen,
        stages=2,
        loss_fn=pair_loss if reversible else mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        **cut,
    )


def paired(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, torch.Tensor]:
    x, y = batch
    return (x[:, :3].clone(), x[:, 3:].clone()), y


def pair_loss(out: Any, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(torch.cat(out, 1), y)


def session(name: str, folder: str | None, kills: int, seed: int) -> dict[str, Any]:
    """Train to the end; in the first `kills` starts some rank dies a moment after a new checkpoint is there."""
    start = int(os.environ.get("UNLATCH_RESTARTS", "0"))
    reversible = METHODS[name][2]
    with begun(name) as run:
        trainer = unlatch.Trainer(run, folder, save_every="5 batches" if folder is not None else None)
        resumed = folder is not None and trainer.resume()
        chance = random.Random(1000 * seed + start)
        victim, moment = chance.randrange(2), chance.uniform(0.0, 0.05)
        if folder is not None and start < kills and int(os.environ["RANK"]) == victim:
            threading.Thread(target=_die, args=(trainer, moment), daemon=True).start()
        batches = [paired(batch) for batch in data()] if reversible else data()
        trainer.fit(batches if 0 in run.stations else None, until=EPOCHS, on_step=lambda _: time.sleep(0.003))
        beside = [p for s in run.stations.values() for one in s.trained().values() for p in one.module.parameters()]
        weights = [t.detach().clone() for t in (*run.module().state_dict().values(), *beside)]
        return {"weights": weights, "resumed": resumed, "start": start}


def _die(trainer: unlatch.Trainer, moment: float) -> None:
    assert trainer.checkpoints is not None
    before = trainer.checkpoints.latest()
    while trainer.checkpoints.latest() == before:
        time.sleep(0.002)
    time.sleep(moment)
    os.kill(os.getpid(), signal.SIGKILL)
