"""What the recursion has to know of a torch optimizer."""

from __future__ import annotations

import inspect
from copy import copy
from typing import Any

from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, RAdam

from ..rules.updates import StagePlace, UpdateRule
from ..runtime.updating import Optimizer
from ..schedule.stability import Motion

__all__ = ["motion_of", "tuned_motion"]

#: They follow an average of the gradients, whatever they divide it by.
_AVERAGING = (Adam, AdamW, Adamax, NAdam, RAdam)


def motion_of(optimizer: Optimizer) -> Motion | None:
    """How an optimizer moves most of its weights; `None` if no recursion here describes it.

    None does where a class has a step of its own, whatever it derives from, where momentum never fades, or where new
    gradients do not get into it.

    What Adam and its kin divide the average by changes slowly and counts as part of the curvature. NAdam looks ahead
    as Nesterov's momentum does, with the momentum that it rises to.

    >>> import torch
    >>> weights = [torch.zeros(1)]
    >>> motion_of(torch.optim.NAdam(weights, betas=(0.75, 0.999)))
    Motion(momentum=0.75, nesterov=True, fed=0.25, decay=0.0, decoupled=False, scale_free=True)
    >>> motion_of(torch.optim.RMSprop(weights)) is None
    True
    """
    group = max(optimizer.param_groups, key=lambda one: sum(p.numel() for p in one["params"]))
    if _steps_as(optimizer, SGD):
        momentum = float(group["momentum"])
        fed = 1.0 - float(group["dampening"]) if momentum else 1.0
        if momentum >= 1.0 or fed <= 0.0:
            return None
        return Motion(momentum, bool(group["nesterov"]), fed, _decay(group))
    if _steps_as(optimizer, *_AVERAGING):
        momentum = float(group["betas"][0])
        # Decay inside the gradient is divided like it, by what is not known here.
        decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
        decay = _decay(group) if decoupled else 0.0
        return Motion(momentum, isinstance(optimizer, NAdam), 1.0 - momentum, decay, decoupled, scale_free=True)
    return None


def tuned_motion(optimizer: Optimizer, rule: UpdateRule, place: StagePlace) -> Motion | None:
    """The same for a stage whose optimizer a method sets by its place; the optimizer that is given stays as it is."""
    tuned = copy(optimizer)
    tuned.param_groups = [dict(group) for group in optimizer.param_groups]
    rule.tune(tuned, place)
    return motion_of(tuned)


def _steps_as(optimizer: Optimizer, *kinds: type[Optimizer]) -> bool:
    # Torch wraps the step of a class when it is first made, of a derived class too.
    step = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, kind) and step is inspect.unwrap(kind.step) for kind in kinds)


def _decay(group: dict[str, Any]) -> float:
    return float(group["lr"]) * float(group["weight_decay"])
