"""AsyncPP: PipeDream with an optimizer that looks ahead, and settings that follow the delay of each stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ..rules.activations import Graph
from ..rules.bundle import Rules
from ..rules.updates import StagePlace, UpdateRule
from ..rules.weights import Stash
from ..schedule import Schedule, one_f_one_b_async
from .base import Delayed, register
from .options import at_least

__all__ = ["AsyncPP"]


@register
@dataclass(frozen=True)
class AsyncPP(Delayed):
    """Asynchronous pipeline with Nesterov's look-ahead as the correction of delay (ICML 2025).

    Meant for `optimizer=partial(torch.optim.NAdam, lr=..., betas=(0.99, 0.999), momentum_decay=0.004)`, the published
    one. With another optimizer only the step sizes follow the delay, unless it has `betas` as well.

    **Arguments:**

    - `momentum`: `"versions"` lets the first of the optimizer's `betas` rise with the number v of weight versions that
      a stage has under way, to `1 - (1 - beta) / v`; `"given"` leaves it alone. The published text has it rise; this
      form, in which the memory of the average grows like v, is inferred.
    - `discount_updates`: over the first T updates the step size is divided by `(v - 1) ** (1 - t / T)`, where v > 2.

    >>> AsyncPP().lateness(3), AsyncPP(microbatches=1).staleness(3)
    ((2, 1, 0), (2.0, 1.0, 0.0))
    """

    momentum: Literal["versions", "given"] = "versions"
    discount_updates: Annotated[int, at_least(0)] = 0

    name = "asyncpp"
    summary = "pipedream whose momentum and step size follow the delay; for NAdam"

    def schedule(self, stages: int) -> Schedule:
        return one_f_one_b_async(stages)

    def rules(self) -> Rules:
        update = DelayedSteps(decay=self.gamma, raises=self.momentum == "versions", discount=self.discount_updates)
        return self._rules(Graph(), Stash(), update=update)


@dataclass(frozen=True)
class DelayedSteps(UpdateRule):
    """Momentum and step size by the number of weight versions, which is the delay and one.

    >>> rule = DelayedSteps(discount=100)
    >>> [rule.scale_at(StagePlace(0, 5, delay=4), update) for update in (0, 50, 100)]
    [0.25, 0.5, 1.0]
    """

    raises: bool = True
    discount: int = 0

    def scale_at(self, place: StagePlace, update: int) -> float:
        if update >= self.discount:
            return 1.0
        return float(max(1, place.delay) ** -(1.0 - update / self.discount))

    def tune(self, optimizer: Any, place: StagePlace) -> None:
        for group in optimizer.param_groups if self.raises and place.delay else ():
            if "betas" in group:
                first, *others = group["betas"]
                group["betas"] = (1.0 - (1.0 - first) / (place.delay + 1), *others)
