"""A moving average of the weights, which often does better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointMismatch, ConfigError
from ..rules.weights import weights_at
from ..train import Callback, Epoch, StepResult, Trainer

__all__ = ["EMA"]


class EMA(Callback):
    """Keeps an exponential moving average of all trained parameters, each rank of its own stages.

    After every update of a stage its average moves to the new weights by 1 - `decay`; in the beginning faster, by
    9 / (10 + n) at the n-th update. It is part of checkpoints, and any cut and number of ranks goes on with it. Batch
    norm statistics are not averaged.

    **Arguments:**

    - `decay`: nearer to 1 is slower.
    - `evaluate`: evaluate the averaged weights too, after every epoch: their results are called `ema_loss`,
      `ema_accuracy` and so on, and can be monitored.

    >>> import torch, unlatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> run = unlatch.parallelize(model, "bp", stages=2, loss_fn=torch.nn.functional.cross_entropy, split=["1"],
    ...                           optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> batches, ema = [(torch.randn(8, 4), torch.randint(2, (8,)))], EMA(0.99)
    >>> (epoch,) = unlatch.Trainer(run, callbacks=[ema]).fit(batches, eval_loader=batches)
    >>> sorted(epoch.evaluation)
    ['accuracy', 'ema_accuracy', 'ema_loss', 'loss', 'samples']
    >>> with ema.averaged():
    ...     weights = {name: t.clone() for name, t in run.module().state_dict().items()}
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"decay must be at least 0 and less than 1, got {decay!r}")
        self.decay, self.evaluate = decay, evaluate
        self._trainer: Trainer | None = None
        # Averages by name, and by stage the updates that they have seen.
        self._averages: dict[str, Tensor] = {}
        self._seen: dict[int, int] = {}

    def attach(self, trainer: Trainer) -> None:
        """Find the parameters."""
        self._trainer = trainer

    def on_start(self, trainer: Trainer) -> None:
        """Begin with the weights as they are, unless there is an average already."""
        for stage, parameters in trainer.run.named_parameters():
            self._seen.setdefault(stage.index, stage.version)
            for name, p in parameters.items():
                known = self._averages.setdefault(name, p.detach().clone())
                if known.shape != p.shape:
                    raise CheckpointMismatch(
                        f"the average of {name} has shape {tuple(known.shape)} and the parameter {tuple(p.shape)}"
                    )

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move the averages of the stages that were updated."""
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        for stage, parameters in trainer.run.named_parameters():
            updates = stage.version - self._seen[stage.index]
            self._seen[stage.index] = stage.version
            if updates > 0 and parameters:
                kept = min(self.decay, (1 + stage.version) / (10 + stage.version)) ** updates
                averages = [self._averages[name] for name in parameters]
                with torch.no_grad():
                    torch._foreach_lerp_(averages, list(parameters.values()), 1 - kept)

    def on_evaluation(self, trainer: Trainer, found: dict[str, float]) -> None:
        """Evaluate the averaged weights as well."""
        self._follow(trainer)
        if self.evaluate:
            with self.averaged():
                again = trainer.evaluate()
            found |= {f"ema_{name}": value for name, value in again.items() if name != "samples"}

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """The last pass ends with updates that belong to no step."""
        self._follow(trainer)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the run shows the averaged weights, for `evaluate` and `module()`, not to train. On every rank.

        What `module()` returns is the model itself: copy there what is to stay.
        """
        if self._trainer is None or not self._averages:
            raise ConfigError("there is no average yet: pass the callback to a Trainer and call fit")
        with ExitStack() as shown:
            for _, parameters in self._trainer.run.named_parameters():
                values = [self._averages[name] for name in parameters]
                shown.enter_context(weights_at(list(parameters.values()), values))
            yield

    def state(self) -> dict[str, Any]:
        """The averages by the names of their parameters."""
        return dict(self._averages)

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with these averages."""
        assert self._trainer is not None
        self._averages = {name: t.clone() for name, t in state.items()}
        self._seen = {stage.index: stage.version for stage, _ in self._trainer.run.named_parameters()}
