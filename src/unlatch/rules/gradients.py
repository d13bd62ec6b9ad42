"""What becomes of a gradient on its way: when it is received from above, and when it joins those of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

from .updates import StagePlace, View

__all__ = ["FromAbove", "Gradient", "GradientView", "Gradients", "ShrinkingView", "Shrunk"]

Gradients: TypeAlias = list[Tensor | None]


class GradientView(View):
    """What one stage does with its gradients. This base: nothing."""

    def received(self, cotangent: Gradients, age: int) -> Gradients:
        """The gradient of the stage's output that a backward starts from.

        **Arguments:** `age`: updates of this stage since the forward.
        """
        return cotangent

    def collecting(self, age: int) -> AbstractContextManager[None]:
        """A context around a backward that adds to `.grad` of the weights."""
        return nullcontext()


@dataclass(frozen=True)
class Gradient:
    """Where the gradient of a stage comes from and what is done to it; `at` makes it for one stage."""

    #: Tensors of the size of the weights that it takes.
    copies: ClassVar[int] = 0
    #: Whether what becomes of the gradients of parts of a micro-batch adds up to what becomes of the whole.
    adds_up: ClassVar[bool] = True

    @property
    def border_factor(self) -> float | None:
        """What multiplies a gradient at every border; `None` if that is not all that happens to it."""
        return None

    def at(self, params: Sequence[Tensor], place: StagePlace) -> GradientView:
        """The view of one stage."""
        return GradientView()


@dataclass(frozen=True)
class FromAbove(Gradient):
    """As the stage above sends it."""

    @property
    def border_factor(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Shrunk(Gradient):
    """Multiplied by `factor` at every border that it crosses."""

    factor: float = 1.0

    @property
    def border_factor(self) -> float:
        return self.factor

    def at(self, params: Sequence[Tensor], place: StagePlace) -> GradientView:
        return ShrinkingView(self.factor) if self.factor != 1.0 else GradientView()


class ShrinkingView(GradientView):
    """Multiplies what it receives."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def received(self, cotangent: Gradients, age: int) -> Gradients:
        return [None if g is None else g * self._factor for g in cotangent]
