"""Methods in which no gradient crosses a border: every stage starts its backward from something it has itself.

DGL gives each stage a classifier of its own, DNI a network that guesses the gradient. (AuxNet is in `auxnet`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from ..rules.bundle import Rules
from ..rules.updates import OptimizerFactory
from ..schedule import Schedule
from ..schedule.concurrent import Concurrent
from .base import Method, register
from .checks import as_function, check_flag, check_positive

__all__ = ["DGL", "DNI", "Local", "OptimizerFactory"]


@dataclass(frozen=True)
class Local(Method):
    """Base of the methods with local losses. They need `sample=(x, y)`, to build what each stage is given."""

    def schedule(self, stages: int) -> Schedule:
        return Concurrent(stages)

    def rules(self) -> Rules:
        return Rules()

    def lag(self, stages: int) -> int:
        """Batches fed before the loss of a batch is known at the first stage."""
        return 0


@register
@dataclass(frozen=True)
class DGL(Local):
    """Decoupled greedy learning (Belilovsky et al. 2020): each stage is trained on the loss of its own small head.

    Stages work like a pipeline in which nothing comes back, so no gradient is ever stale.

    **Arguments:**

    - `head`: a function `(border_shape, output_shape) -> nn.Module`; pooling, three 1x1 convolutions and a perceptron
      of three layers unless given.
    - `head_optimizer`: factory for the heads; that of the run unless given.

    >>> DGL().gaps(3), DGL().lag(3)
    ((0, 0, 0), 2)
    """

    head: Callable[[tuple[int, ...], tuple[int, ...]], nn.Module] | None = field(default=None, repr=False)
    head_optimizer: OptimizerFactory | None = field(default=None, repr=False)

    name = "dgl"
    summary = "each stage has a classifier of its own; no gradient crosses a border"

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, of in (("head", "(border_shape, output_shape)"), ("head_optimizer", "the parameters")):
            object.__setattr__(self, what, as_function(f"dgl: {what}", getattr(self, what), of))

    def lag(self, stages: int) -> int:
        return stages - 1


@register
@dataclass(frozen=True)
class DNI(Local):
    """Decoupled neural interfaces (Jaderberg et al. 2017): each stage guesses the gradient that will come from above.

    The guess is learned from the gradient that the next stage finds, which may rest on a guess itself. It is two
    batches old when it arrives, which is what a pipeline of one batch per stage and tick needs.

    **Arguments:**

    - `synthesiser`: a function `(border_shape, classes) -> nn.Module` with `forward(h, target)` and
      `loss(h, target, gradient)`; three layers unless given.
    - `conditioned`: whether it also sees class labels.
    - `learning_rate`: of Adam, which trains it.

    >>> DNI().lag(3)
    3
    """

    synthesiser: Callable[[tuple[int, ...], int], nn.Module] | None = field(default=None, repr=False)
    conditioned: bool = True
    learning_rate: float = 1e-3

    name = "dni"
    summary = "each stage guesses the gradient from above"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("dni: learning_rate", self.learning_rate)
        check_flag("dni: conditioned", self.conditioned)
        made = as_function("dni: synthesiser", self.synthesiser, "(border_shape, classes)")
        object.__setattr__(self, "synthesiser", made)

    def lag(self, stages: int) -> int:
        return stages if stages > 1 else 0
