"""Your own method: any schedule with any rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from ..rules.activations import activation
from ..rules.bundle import Rules
from ..rules.weights import backward_weights
from ..schedule import Schedule
from .base import Delayed

__all__ = ["Compose"]


@dataclass(frozen=True)
class Compose(Delayed):
    """Cross the parts of other methods.

    **Arguments:** `order`: a function from the number of stages to a schedule; the others as in `Rules`.

    DTR on PipeDream's order, for half the delay:

    >>> from unlatch.schedule import one_f_one_b_async
    >>> Compose(order=one_f_one_b_async, activations="input").lateness(3)
    (2, 1, 0)
    """

    order: Callable[[int], Schedule] | None = None
    activations: Literal["graph", "input", "reverse"] = "graph"
    weights: Literal["current", "stash", "latest", "average"] = "stash"

    name = "compose"
    summary = "any schedule with any rules"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order is not None and not callable(self.order):
            raise ConfigError(
                f"compose: order must be a function from the number of stages to a schedule, got {self.order!r}"
            )
        self.rules()

    def schedule(self, stages: int) -> Schedule:
        if self.order is None:
            raise ConfigError("Compose needs order=, a function from the number of stages to a schedule")
        found = self.order(stages)
        if not isinstance(found, Schedule):
            raise ConfigError(f"compose: order must return a schedule, got {type(found).__name__} for {stages} stages")
        return found

    def rules(self) -> Rules:
        return self._rules(activation(self.activations), backward_weights(self.weights))
