"""One pass over the data, what it brought, and which of its numbers says how good it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import ConfigError
from ..runtime.engine import Finished

__all__ = ["Epoch", "Monitor", "Pass", "results_by_path"]

#: How names end of which less is better.
_LESS_IS_BETTER = ("loss", "perplexity", "error")


@dataclass(frozen=True)
class Epoch:
    """One pass over the data: mean training loss, samples per second while training, evaluation results."""

    epoch: int
    loss: float
    samples: int
    samples_per_second: float
    evaluation: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """How good the model is after it, higher is better: the accuracy, or minus the loss where there is none."""
        return self.evaluation.get("accuracy", -self.evaluation.get("loss", self.loss))

    def numbers(self) -> dict[str, float]:
        """Its number, losses, speed and results by the names that logs use."""
        return {
            "epoch/number": self.epoch + 1,
            "train/epoch_loss": self.loss,
            "train/samples_per_second": self.samples_per_second,
            **results_by_path(self.evaluation),
        }


def results_by_path(evaluation: Mapping[str, float]) -> dict[str, float]:
    """Results by the names that logs use, in which a metric's own name is one part of a path.

    >>> results_by_path({"top 5": 0.9})
    {'eval/top_5': 0.9}
    """
    return {f"eval/{re.sub(r'[^A-Za-z0-9_.@-]+', '_', name)}": value for name, value in evaluation.items()}


@dataclass(frozen=True)
class Monitor:
    """Which number of an epoch says how good the model is.

    **Arguments:**

    - `name`: of a result of the evaluation, or `"train_loss"`; `None` for `Epoch.score`.
    - `mode`: whether the best is the `"min"` or the `"max"`; the least of what ends in loss, perplexity or error, the
      most of anything else, unless given.

    >>> Monitor("perplexity").score(Epoch(0, 2.0, 8, 100.0, {"perplexity": 5.0}))
    -5.0
    """

    name: str | None = None
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max", None):
            raise ConfigError(f'mode must be "min" or "max", got {self.mode!r}')

    def score(self, epoch: Epoch) -> float:
        """Of an epoch, higher is better."""
        if self.name is None:
            return epoch.score
        known = {**epoch.evaluation, "train_loss": epoch.loss}
        if self.name not in known:
            raise ConfigError(
                f"there is no {self.name!r} to watch: epoch {epoch.epoch + 1} has {', '.join(known)}; ask for it with "
                "metrics=[...] and an eval_loader"
            )
        mode = self.mode or ("min" if self.name.endswith(_LESS_IS_BETTER) else "max")
        return known[self.name] if mode == "max" else -known[self.name]


class Pass:
    """Sums over the batches that finished in one pass over the data, with those before a resume.

    **Arguments:** `weight`: what the losses are means over, if it is not samples.
    """

    def __init__(self, samples: int = 0, loss: float = 0.0, weight: float | None = None) -> None:
        self.samples, self.loss = samples, loss
        self.weight = float(samples) if weight is None else weight
        self.seconds = 0.0
        self._before = samples

    def add(self, finished: Iterable[Finished]) -> None:
        """Count batches."""
        for batch in finished:
            self.samples += batch.samples
            self.loss += batch.loss * batch.weight
            self.weight += batch.weight

    @property
    def mean_loss(self) -> float:
        """Over what the losses are means over."""
        return self.loss / (self.weight or 1.0)

    @property
    def speed(self) -> float:
        """Samples per second, as far as they were timed."""
        return (self.samples - self._before) / max(self.seconds, 1e-9)
