"""Which learning rates a schedule is going to set, found by letting a copy of it run ahead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["foreseen_rates", "rates_of"]


def rates_of(optimizer: Optimizer) -> list[float]:
    """The learning rate of each group, now."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def foreseen_rates(
    optimizer: Optimizer, schedule: Any, updates: int, after: Callable[[LRScheduler, int], None]
) -> list[list[float]]:
    """The learning rate of each group at each of the next `updates` updates; optimizer and schedule stay as they are.

    **Arguments:**

    - `schedule`: of the optimizer. One that is no torch scheduler is taken to leave the rates alone, since only its
      owner knows how to copy it.
    - `after`: of (a copy of the schedule, n): makes the steps that are due after the n-th update from now, from 1 on.

    >>> import torch
    >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    >>> halving = torch.optim.lr_scheduler.ExponentialLR(sgd, gamma=0.5)
    >>> sgd.step(); halving.step()
    >>> foreseen_rates(sgd, halving, 3, lambda schedule, n: schedule.step()), sgd.param_groups[0]["lr"]
    ([[0.5, 0.25, 0.125]], 0.5)
    """
    found = [rates_of(optimizer)]
    if not isinstance(schedule, LRScheduler):
        found *= updates
    elif updates > 1:
        stand_in = _stand_in(optimizer)
        ahead = _twin(schedule, stand_in)
        for n in range(1, updates):
            after(ahead, n)
            found.append(rates_of(stand_in))
    return [list(rates) for rates in zip(*found, strict=True)]


def _stand_in(optimizer: Optimizer) -> Optimizer:
    """The same optimizer but for its groups, which are what a schedule writes to; some rates are tensors."""
    groups = [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    stand_in = object.__new__(type(optimizer))
    # Torch warns of a schedule that is ahead of its optimizer, which this one is meant to be.
    vars(stand_in).update(vars(optimizer), param_groups=groups, _opt_called=True)
    return stand_in


def _twin(schedule: LRScheduler, optimizer: Optimizer) -> LRScheduler:
    """A copy for another optimizer. Functions of the user's are shared: who knows what hangs on them."""

    def copied(value: Any) -> Any:
        if isinstance(value, Optimizer):
            return optimizer
        if isinstance(value, LRScheduler):
            return _twin(value, optimizer)
        if type(value) in (list, tuple):
            return type(value)(copied(item) for item in value)
        return copy.copy(value) if isinstance(value, (dict, set)) else value

    twin = object.__new__(type(schedule))
    vars(twin).update({name: copied(value) for name, value in vars(schedule).items()})
    return twin
