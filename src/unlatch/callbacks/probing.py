"""Comparisons of gradients with backpropagation on the way."""

from __future__ import annotations

from ..train import Callback, Epoch, StepResult, Trainer
from ..train.probe import Comparison, as_metrics

__all__ = ["GradientProbing"]


class GradientProbing(Callback):
    """Compares the gradients of some updates with exact backpropagation and logs what it finds; inline runs only.

    **Arguments:** `every`: updates between two comparisons.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self._found: list[dict[str, float]] = []
        self._probes = False

    def on_start(self, trainer: Trainer) -> None:
        """Begin to look."""
        if not self._probes:
            self._probes = True
            trainer.run.probe_gradients(every=self.every, on_found=self._keep)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log what was found: a probe speaks in the middle of a step, numbers are written at its end."""
        self._log(trainer)

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """The last pass ends with updates that belong to no step."""
        self._log(trainer)

    def _keep(self, found: list[Comparison]) -> None:
        if found:
            self._found.append({"probe/update": found[0].update, **as_metrics(found)})

    def _log(self, trainer: Trainer) -> None:
        found, self._found = self._found, []
        for numbers in found:
            trainer.log(numbers)
