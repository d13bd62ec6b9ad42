"""What the user says about updates (optimizers, learning rates, clipping), checked before anything is built."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import ConfigError
from ..methods import Method, get, names

__all__ = ["check_clipping", "check_factories"]


def check_factories(optimizer: Any, lr_scheduler: Any, per: str) -> None:
    """Refuse what is no factory, such as an optimizer or a scheduler that is made already."""
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer must be a function from parameters to an optimizer, called once per stage, got "
            f"{_described(optimizer)}: pass functools.partial({_class_to_pass(optimizer, 'torch.optim.SGD')}, lr=...)"
        )
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise ConfigError(
            "lr_scheduler must be a function from an optimizer to its scheduler, called once per stage, got "
            f"{_described(lr_scheduler)}: pass functools.partial({_class_to_pass(lr_scheduler, 'StepLR')}, ...) "
            "without the optimizer"
        )
    if per not in ("update", "epoch"):
        raise ConfigError(f'lr_scheduler_per must be "update" or "epoch", got {per!r}')


def _class_to_pass(value: Any, otherwise: str) -> str:
    return type(value).__name__ if isinstance(value, Optimizer | LRScheduler) else otherwise


def _described(value: Any) -> str:
    made = isinstance(value, Optimizer | LRScheduler)
    return f"a {type(value).__name__} that is made already" if made else type(value).__name__


def check_clipping(method: Method, stages: int, limit: float | None, norm_of: str) -> None:
    """Refuse to limit the norm of all gradients where stages do not update together."""
    if norm_of not in ("stage", "model"):
        raise ConfigError(f'clip_norm_of must be "stage" or "model", got {norm_of!r}')
    together = method.schedule(stages).flushes or stages == 1
    if limit is None or norm_of == "stage" or together:
        return
    able = ", ".join(name for name in names() if get(name).schedule(1).flushes)
    raise ConfigError(
        f'clip_norm_of="model" needs the gradients of all stages at once, and {method.name} updates each stage when '
        'its own are there: take clip_norm_of="stage", which limits each by itself (with clip_grad_norm='
        f"{limit / stages**0.5:.3g} the whole stays below {limit:g}), or a method that updates all together ({able})"
    )
