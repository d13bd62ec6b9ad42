"""A module beside the network that a worker trains: AuxNet, local head, synthesiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..rules.updates import OptimizerFactory, StagePlace, make_optimizer

__all__ = ["Trained"]


class Trained:
    """A module with its own optimizer and learning-rate schedule.

    **Arguments:**

    - `module`: trained as a whole.
    - `optimizer`, `lr_scheduler`: factories, as those of a run.
    - `clip_grad_norm`: limit of the gradient's norm.
    - `place`: of the stage that it stands beside, for factories that ask for it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerFactory,
        lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        clip_grad_norm: float | None = None,
        place: StagePlace | None = None,
    ) -> None:
        self.module = module.train()
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.params = [p for _, p in named]
        place = replace(place or StagePlace(0, 1), names=tuple(name for name, _ in named))
        self.optimizer = make_optimizer(optimizer, self.params, place) if self.params else None
        self.scheduler = lr_scheduler(self.optimizer) if lr_scheduler is not None and self.optimizer else None
        self._clip = clip_grad_norm

    def update(self, batches: int = 1, *, schedule: bool = True) -> None:
        """Apply the gradients of `batches` batches, averaged; move the learning-rate schedule on if `schedule`."""
        if self.optimizer is None:
            return
        if batches > 1:
            torch._foreach_div_([p.grad for p in self.params if p.grad is not None], float(batches))
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self.params, self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and schedule:
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        """Weights, buffers and optimizer state, for a checkpoint."""
        found = {f"module/{name}": t for name, t in self.module.state_dict().items()}
        if self.optimizer is not None:
            for number, p in enumerate(self.params):
                for key, value in self.optimizer.state.get(p, {}).items():
                    if value is not None:
                        found[f"optimizer/{number}/{key}"] = torch.as_tensor(value)
        return found

    def load_tensors(self, found: dict[str, Tensor]) -> bool:
        """Take over what `tensors` returned. **Returns:** whether it was of the same module; else nothing is done."""
        prefix = "module/"
        state = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        own = self.module.state_dict()
        if state.keys() != own.keys() or any(state[k].shape != t.shape for k, t in own.items()):
            return False
        self.module.load_state_dict(state)
        if self.optimizer is None:
            return True
        self.optimizer.state.clear()
        for full, value in found.items():
            if full.startswith("optimizer/"):
                _, number, key = full.split("/", 2)
                self.optimizer.state[self.params[int(number)]][key] = value.clone()
        return True

    def settings(self) -> dict[str, Any]:
        """Learning rate and schedule, as plain numbers."""
        if self.optimizer is None:
            return {}
        schedule = self.scheduler.state_dict() if self.scheduler is not None else {}
        groups = [{k: v for k, v in g.items() if isinstance(v, int | float)} for g in self.optimizer.param_groups]
        return {"groups": groups, "schedule": {k: v for k, v in schedule.items() if _plain(v)}}

    def load_settings(self, found: dict[str, Any]) -> None:
        """Take over what `settings` returned."""
        if self.optimizer is None or not found:
            return
        for group, saved in zip(self.optimizer.param_groups, found["groups"], strict=False):
            group.update(saved)
        if self.scheduler is not None:
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **found["schedule"]})


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
