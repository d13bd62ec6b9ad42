"""Fully decoupled training with kept graphs: FDG and, with accumulation, ADL (Zhuang et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..rules.activations import Graph
from ..rules.bundle import Rules
from ..rules.weights import backward_weights
from ..schedule import Schedule, ticked
from .base import Delayed, register

__all__ = ["ADL", "FDG"]


@register
@dataclass(frozen=True)
class FDG(Delayed):
    """All locks open, delay 2(K-k), the graph and its weights are kept; `beta` shrinks gradients on their way down.

    **Arguments:** `weights`: `"stash"` takes the gradient at the weights of the forward; `"latest"` mixes old
    activations with new weights, as the authors' code does.

    >>> FDG().lateness(3)
    (3, 1, 0)
    """

    weights: Literal["stash", "latest"] = "stash"

    name = "fdg"
    summary = "ticked, delay 2(K-k), graphs kept"

    def schedule(self, stages: int) -> Schedule:
        return ticked(stages, backward_first=True)

    def rules(self) -> Rules:
        return self._rules(Graph(), backward_weights(self.weights))


@register
@dataclass(frozen=True)
class ADL(FDG):
    """FDG with accumulation: several micro-batches per update, so that fewer updates pass while a batch is under way.

    **Arguments:** `average`: the authors' code adds up the gradients of accumulated batches; the default averages.
    """

    average: bool = True

    name = "adl"
    summary = "fdg with at least two micro-batches per update"

    def rules(self) -> Rules:
        rules = super().rules()
        return replace(rules, update=replace(rules.update, averages=self.average))

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        return max(2, super().choose_microbatches(stages, batch_size))
