"""Ending when nothing gets better any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from ..errors import ConfigError
from ..train import Callback, Epoch, Monitor, Trainer

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Ends training after some epochs without a better result. What it remembers is part of checkpoints.

    **Arguments:**

    - `monitor`: a result of the evaluation, or `"train_loss"`; the accuracy unless given, or the loss where there is
      none.
    - `patience`: epochs without a better result that end it.
    - `min_delta`: by less than this nothing gets better.
    - `mode`: `"min"` or `"max"` is best; found by the name unless given, see `unlatch.train.Monitor`.

    >>> import torch, unlatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> run = unlatch.parallelize(model, "bp", stages=2, loss_fn=torch.nn.functional.cross_entropy, split=["1"],
    ...                           optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    >>> trainer = unlatch.Trainer(run, callbacks=[EarlyStopping("loss", patience=2)])
    >>> len(trainer.fit(batches, epochs=9, eval_loader=batches)), trainer.stopped
    (3, 'loss has not become better for 2 epochs')
    """

    def __init__(
        self,
        monitor: str | None = None,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if patience < 1 or min_delta < 0:
            raise ConfigError(f"patience must be at least 1 and min_delta at least 0, got {patience}, {min_delta}")
        self.monitor = Monitor(monitor, mode)
        self.patience, self.min_delta = patience, min_delta
        #: The best score so far, higher is better, and the epochs since.
        self.best: float | None = None
        self.waited = 0

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """Compare it with the best."""
        score = self.monitor.score(epoch)
        if not math.isnan(score) and (self.best is None or score > self.best + self.min_delta):
            self.best, self.waited = score, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            trainer.stop(f"{self.monitor.name or 'the score'} has not become better for {self.waited} epochs")

    def state(self) -> dict[str, Any]:
        """The best score and the epochs since."""
        return {"best": self.best, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.best, self.waited = state["best"], int(state["waited"])
