"""Sessions with callbacks and metrics, alone and on ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.callbacks import EMA, Callback, EarlyStopping, LearningRates
from unlatch.errors import CallbackFailed, OutOfStep, PeerLost
from unlatch.metrics import accuracy, perplexity, top_k

Batch = tuple[torch.Tensor, torch.Tensor]


def begun(method: str = "dtr", lr: float = 0.1, **changes: Any) -> unlatch.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    settings: dict[str, Any] = {"stages": 2, "loss_fn": cross_entropy, "optimizer": optimizer, "split": ["2"]}
    return unlatch.parallelize(model, method, **{**settings, **changes})


def batches(count: int = 5, seed: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)]


def mine(run: unlatch.Run, data: list[Batch]) -> list[Batch] | None:
    """The data where they are read."""
    return data if 0 in run.stations else None


def averages(ema: EMA, run: unlatch.Run) -> dict[str, torch.Tensor]:
    with ema.averaged():
        return {name: t.clone() for name, t in run.module().state_dict().items()}


def session(folder: str | None, stops: list[int], epochs: int = 4) -> dict[str, Any]:
    """Train with early stopping and an average, in several sessions, each ended after so many batches."""
    history: list[tuple[Any, ...]] = []
    for number, stop in enumerate([*stops, 10**6]):
        with begun() as run:
            ema, early = EMA(0.9), EarlyStopping("ema_loss", patience=3, min_delta=0.05)
            trainer = unlatch.Trainer(run, folder, callbacks=[ema, early], metrics=[accuracy, top_k(2), perplexity])
            if folder is not None:
                assert trainer.resume() == (number > 0)
            fed = iter([False] * stop)
            found = trainer.fit(
                mine(run, batches()),
                until=epochs,
                eval_loader=mine(run, batches(2, seed=8)),
                stop=lambda fed=fed: next(fed, True),  # type: ignore[misc]
            )
            history += [(e.epoch, e.loss, e.samples, e.evaluation) for e in found]
            if number == len(stops):
                kept = {"best": early.best, "waited": early.waited, "stopped": trainer.stopped}
                return {"history": history, "averages": averages(ema, run), **kept}
            trainer.save()
    raise AssertionError("the last session goes on to the end")


class Slowly(list[Batch]):
    """Batches that take their time, so that a rank hears of another before it has fed them all."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in super().__iter__():
            time.sleep(0.02)
            yield batch


class Fails(Callback):
    """Raises at one batch, on one rank."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step(self, trainer: unlatch.Trainer, result: unlatch.StepResult) -> None:
        if trainer.rank == self.rank and result.step == self.step:
            raise ValueError("no such curve")


class FailsToWrite(Callback):
    """Raises on one rank when it is to write down an epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_log(self, trainer: unlatch.Trainer, step: int, numbers: Mapping[str, float]) -> None:
        if trainer.rank == self.rank and "epoch/number" in numbers:
            raise OSError("no room")


def fails_to_write(rank: int) -> str:
    """What every rank is told, where another callback exchanges values at the same time."""
    with begun() as run:
        trainer = unlatch.Trainer(run, callbacks=[LearningRates(), FailsToWrite(rank)])
        try:
            trainer.fit(mine(run, batches()), epochs=2)
        except (CallbackFailed, PeerLost) as error:
            return f"{type(error).__name__}: {error}"
    return ""


class Asks(Callback):
    """Asks for the end on one rank."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step(self, trainer: unlatch.Trainer, result: unlatch.StepResult) -> None:
        if trainer.rank == self.rank and result.step == self.step:
            trainer.stop("enough")


def asked_to_stop(rank: int) -> tuple[int, bool, str | None]:
    """Batches fed, whether a pass was cut short, and why."""
    with begun() as run:
        trainer = unlatch.Trainer(run, callbacks=[Asks(rank, 3)])
        trainer.fit(mine(run, batches()), epochs=4)
        return run.batches, trainer.cut_short, trainer.stopped


def fails(folder: str, rank: int) -> tuple[str, str, bool]:
    """What every rank is told, and whether the checkpoint goes on."""
    text = ""
    with begun() as run:
        trainer = unlatch.Trainer(run, Path(folder), callbacks=[EMA(), Fails(rank, 3)])
        try:
            trainer.fit(mine(run, Slowly(batches(1) * 400)), epochs=2)
        except (CallbackFailed, PeerLost) as error:
            text = f"{type(error).__name__}: {error}"
    with begun() as run:
        trainer = unlatch.Trainer(run, Path(folder), callbacks=[EMA()])
        resumed = trainer.resume()
        return text, Path(folder, "latest").readlink().name, resumed and 3 <= run.batches < 400


class FailsBeforeExchange(Callback):
    """Raises on rank 0 while the others exchange values in the same hook."""

    def on_epoch(self, trainer: unlatch.Trainer, epoch: unlatch.train.Epoch) -> None:
        if trainer.rank == 0:
            raise ValueError("no such curve")
        trainer.gather(epoch.loss)


def fails_before_exchange() -> str:
    """What a rank is told."""
    with begun() as run:
        try:
            unlatch.Trainer(run, callbacks=[FailsBeforeExchange()]).fit(mine(run, batches()), epochs=2)
        except (CallbackFailed, OutOfStep) as error:
            return f"{type(error).__name__}: {error}"
    return ""
