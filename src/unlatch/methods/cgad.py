"""CGAD: stale gradients count less, the older they are and the less they agree with those before them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError
from ..rules.activations import Graph
from ..rules.bundle import Rules
from ..rules.gradients import Gradient, GradientView, ShrinkingView, Shrunk
from ..rules.updates import StagePlace
from ..rules.weights import Stash
from ..schedule import Schedule, one_f_one_b_async
from .base import Delayed, register

__all__ = ["CGAD", "Gated"]


@register
@dataclass(frozen=True)
class CGAD(Delayed):
    """Gradients gated by cosine and age, before the optimizer (2026).

    A gradient of the weights that is `age` updates old is multiplied by `(1 + cos) / 2 * exp(-alpha age)`, where cos is
    the cosine of its angle with the mean of the stage's earlier gradients. Fresh gradients stay as they are. Published
    is the product of a cosine gate and the exponential; the form of the gate, what it compares with, and the order of
    work, that of pipedream, are inferred.

    **Arguments:**

    - `alpha`: how fast a gradient loses weight with its age; 0 leaves that to the gate alone.
    - `memory`: decay of the mean that the gate compares with.

    >>> CGAD().lateness(3)
    (2, 1, 0)
    """

    alpha: float = 0.1
    memory: float = 0.9

    name = "cgad"
    summary = "pipedream whose stale gradients are gated by cosine and age"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rules()

    def schedule(self, stages: int) -> Schedule:
        return one_f_one_b_async(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), Stash(), gradient=Gated(self.alpha, self.memory, self.shrink))


@dataclass(frozen=True)
class Gated(Gradient):
    """The gate as a rule; `factor` shrinks what comes from above."""

    alpha: float = 0.1
    memory: float = 0.9
    factor: float = 1.0

    copies: ClassVar[int] = 1
    adds_up: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not (isinstance(self.alpha, int | float) and math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(f"cgad: alpha must be a finite number, at least 0, got {self.alpha!r}")
        if not (isinstance(self.memory, int | float) and 0.0 <= self.memory < 1.0):
            raise ConfigError(f"cgad: memory must lie in [0, 1), got {self.memory!r}")

    def at(self, params: Sequence[Tensor], place: StagePlace) -> GradientView:
        return _Gate(self, params) if place.delay else Shrunk(self.factor).at(params, place)


class _Gate(ShrinkingView):
    def __init__(self, rule: Gated, params: Sequence[Tensor]) -> None:
        super().__init__(rule.factor)
        self._rule = rule
        self._params = list(params)
        self._mean: list[Tensor] = []

    @contextmanager
    def collecting(self, age: int) -> Iterator[None]:
        """Set what was collected so far aside, so that the gradient of this micro-batch stands alone."""
        earlier = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None
        yield
        fresh = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        weight = self._weight(fresh, age)
        for p, before in zip(self._params, earlier, strict=True):
            if p.grad is not None and weight != 1.0:
                p.grad = p.grad * weight
            if before is not None:
                p.grad = before if p.grad is None else before.add_(p.grad)

    @torch.no_grad()
    def _weight(self, fresh: list[Tensor], age: int) -> float:
        weight = 1.0
        if age and fresh:
            weight = math.exp(-self._rule.alpha * age) * (1.0 + _cosine(fresh, self._mean)) / 2.0
        if not self._mean:
            self._mean = [g.clone() for g in fresh]
        else:
            torch._foreach_lerp_(self._mean, fresh, 1.0 - self._rule.memory)
        return weight

    def forget(self) -> None:
        self._mean = []

    def state(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load(self, state: dict[str, Any]) -> None:
        self._mean = state["mean"]


def _cosine(one: list[Tensor], other: list[Tensor]) -> float:
    """Of the angle between two lists of tensors; 1 where there is nothing to compare with."""
    if not other:
        return 1.0
    products = [float((a * b).sum()) for a, b in zip(one, other, strict=True)]
    size = math.sqrt(sum(float(a.square().sum()) for a in one) * sum(float(b.square().sum()) for b in other))
    return sum(products) / size if size else 1.0
