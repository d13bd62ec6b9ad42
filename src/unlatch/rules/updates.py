"""How a stage applies its gradients: averaged or summed, with which step size, with which optimizer settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from ..errors import ConfigError

__all__ = ["OptimizerFactory", "PerEpoch", "StagePlace", "UpdateRule", "View", "make_optimizer"]

OptimizerFactory: TypeAlias = Callable[..., Optimizer]


@dataclass(frozen=True)
class StagePlace:
    """Where in the network a stage is, for whatever depends on that.

    **Arguments:**

    - `index`, `count`: it is the `index`-th of `count` stages, from 0.
    - `delay`: most updates that pass between one of its forwards and the backward.
    - `names`: of its trained parameters, in the order in which an optimizer factory is given them.
    """

    index: int
    count: int
    delay: int = 0
    names: tuple[str, ...] = ()


def make_optimizer(factory: OptimizerFactory, params: list[nn.Parameter], place: StagePlace) -> Optimizer:
    """Call a factory with the parameters of a stage and with what else it asks for.

    An argument called `named` gets the parameters with their names in the whole model, `[(name, parameter), ...]`; if
    it is the first one, instead of the parameters. An argument called `stage`, or else a second one that has no
    default, gets the place of the stage. Keyword-only arguments with a default are the caller's own.

    >>> import torch
    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> def slower_below(params, stage):
    ...     return torch.optim.SGD(params, lr=0.1 / (1 + stage.delay))
    >>> make_optimizer(slower_below, [w], StagePlace(0, 2, delay=1)).param_groups[0]["lr"]
    0.05
    >>> def without_decay(named):
    ...     return torch.optim.SGD([{"params": [p], "weight_decay": 0.1 * ("bias" not in name)} for name, p in named])
    >>> make_optimizer(without_decay, [w], StagePlace(0, 2, names=("3.bias",))).param_groups[0]["weight_decay"]
    0.0
    >>> type(make_optimizer(torch.optim.SGD, [w], StagePlace(0, 2))).__name__
    'SGD'
    """
    first, second, later = _asked(factory)

    def given(role: str | None) -> Any:
        if role == "named":
            return list(zip(place.names, params, strict=True))
        return params if role is None else place

    others = [given(second)] if second is not None else []
    made = factory(given(first), *others, **{name: given(name) for name in later})
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"the optimizer factory must return a torch.optim.Optimizer, got {type(made).__name__} for stage "
            f"{place.index}"
        )
    return made


def _asked(factory: OptimizerFactory) -> tuple[str | None, str | None, list[str]]:
    """What the first, the second and later arguments of a factory are to be given, where that is not up to it."""
    try:
        listed = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # built-in callables have none
        return None, None, []
    positional = [p for p in listed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    roles = [p.name if p.name in ("named", "stage") else None for p in positional]
    if len(roles) > 1 and roles[1] is None and positional[1].default is inspect.Parameter.empty:
        roles[1] = "stage"
    demanded = [p.name for p in listed if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    later = [name for name in [*roles[2:], *demanded] if name in ("named", "stage")]
    first, second = [*roles, None, None][:2]
    return "named" if first == "named" else None, second, later


@dataclass(frozen=True)
class PerEpoch:
    """A factory of learning-rate schedulers that step when an epoch ends, instead of at every update.

    **Arguments:** `make`: from an optimizer to its scheduler.
    """

    make: Callable[[Optimizer], Any]

    def __call__(self, optimizer: Optimizer) -> Any:
        return self.make(optimizer)


class View:
    """What one stage uses of a rule: it is told of updates, and may remember. This base does not."""

    def before_update(self) -> None:
        """The optimizer is about to step, with the gradients in their final form."""

    def after_update(self) -> None:
        """It has; the gradients are still there."""

    def forget(self) -> None:
        """Drop what is known of earlier updates, so that a continued and a resumed run go on alike."""

    def state(self) -> dict[str, Any]:
        """All it remembers."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""


@dataclass(frozen=True)
class UpdateRule:
    """The common case: the user's optimizer, its step size smaller by a factor for each stage further down.

    **Arguments:**

    - `averages`: whether gradients accumulated over several batches are averaged (else summed).
    - `decay`: learning rate of stage k of K is multiplied by `decay ** (K - k)`.

    >>> UpdateRule(decay=0.5).scale(StagePlace(0, 3))
    0.25
    """

    averages: bool = True
    decay: float = 1.0

    def scale(self, place: StagePlace) -> float:
        """What multiplies the learning rate of a stage, always."""
        return float(self.decay ** (place.count - 1 - place.index))

    def scale_at(self, place: StagePlace, update: int) -> float:
        """What multiplies it besides, at one update."""
        return 1.0

    def tune(self, optimizer: Any, place: StagePlace) -> None:
        """Change settings of a stage's new optimizer, such as its momentum."""
