"""A module beside the network that a station trains: AuxNet, local head, synthesiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..rules.updates import OptimizerFactory, StagePlace, UpdateRule
from .updating import Optimizer, Updater

__all__ = ["Trained"]


class Trained:
    """A module with its own optimizer and learning-rate schedule.

    **Arguments:**

    - `module`: trained as a whole.
    - `place`: of the stage that it belongs to.
    - `optimizer`, `lr_scheduler`: factories, as those of a run.
    - `clip_grad_norm`: limit of the gradient's norm.
    - `checks`: whether gradients and weights that are not finite are refused.
    """

    def __init__(
        self,
        module: nn.Module,
        place: StagePlace,
        optimizer: OptimizerFactory,
        lr_scheduler: Callable[[Optimizer], Any] | None = None,
        clip_grad_norm: float | None = None,
        *,
        checks: bool = True,
    ) -> None:
        self.module = module.train()
        params = [p for p in module.parameters() if p.requires_grad]
        self.updater = Updater(
            params, UpdateRule(), place, optimizer, lr_scheduler, clip_grad_norm=clip_grad_norm, checks=checks
        )

    def update(self, batches: int = 1, *, schedule: bool = True) -> None:
        """Apply the gradients of `batches` batches, averaged; move the learning-rate schedule on if `schedule`."""
        with nullcontext() if schedule else self.updater.unscheduled():
            self.updater.step(max(1.0, batches))

    def state(self) -> dict[str, Any]:
        """Weights, buffers, optimizer and schedule."""
        return {"module": dict(self.module.state_dict()), "updater": self.updater.state()}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is that of the same module."""
        own, saved = self.module.state_dict(), state["module"]
        return own.keys() == saved.keys() and all(saved[name].shape == t.shape for name, t in own.items())

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; the tensors are used as they are."""
        self.module.load_state_dict(state["module"])
        self.updater.load(state["updater"])
