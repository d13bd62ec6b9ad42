"""Gradients of weights that stages share, under methods in which no other gradient crosses a border.

The value of such a weight goes up with the state. What a later stage finds for it, on its own loss, goes down with the
loss, is added to what stages in between found for the same micro-batch, and joins the gradients of the stage that has
the weight:

    stage K      B finds g_K  --O-->  g_K + g_k  --O-->  stage of the weight: .grad += ..., for its next update
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...transport.mail import Micro

__all__ = ["TiedGradients"]

ByName = dict[str, Tensor]


class TiedGradients:
    """What a stage does with them.

    **Arguments:** `own`: weights of this stage that later ones use, by name.
    """

    def __init__(self, own: Mapping[str, nn.Parameter]) -> None:
        self._own = dict(own)
        self._waiting: dict[int, ByName] = {}

    def found(self, micro: Micro, gradients: ByName) -> None:
        """Keep what a backward found for weights of earlier stages, until that of later ones is there."""
        if gradients:
            self._waiting[micro.id] = gradients

    def passed_down(self, micro: Micro, above: ByName | None) -> ByName | None:
        """Add up what later stages and this one found, and take what is for weights of this stage.

        **Returns:** what is for stages below, if anything is.
        """
        total = self._waiting.pop(micro.id, {})
        for name, gradient in (above or {}).items():
            total[name] = total[name] + gradient if name in total else gradient
        for name, weight in self._own.items():
            if name in total:
                gradient = total.pop(name)
                weight.grad = gradient if weight.grad is None else weight.grad + gradient
        return total or None

    def state(self) -> dict[int, ByName]:
        """What is kept of micro-batches under way."""
        return self._waiting

    def load(self, state: Mapping[int, ByName]) -> None:
        """Take over what `state` returned."""
        self._waiting = {number: dict(gradients) for number, gradients in state.items()}

    def unapplied(self) -> ByName:
        """What came after the last update, while nothing is under way."""
        return {name: weight.grad for name, weight in self._own.items() if weight.grad is not None}

    def load_unapplied(self, found: Mapping[str, Any]) -> None:
        """Take over what `unapplied` returned."""
        for name, weight in self._own.items():
            gradient = found.get(name)
            weight.grad = gradient.clone() if gradient is not None else None
