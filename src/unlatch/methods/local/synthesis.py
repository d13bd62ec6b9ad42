"""A synthesiser at work: it guesses the gradient at a stage's output and learns from the one that comes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.trained import Trained

__all__ = ["SYNTHESISERS_APART", "Synthesis"]

#: Why methods with synthesisers train no replicas.
SYNTHESISERS_APART = (
    "its synthesisers learn from every gradient as it comes, with no point between gradient and update at which "
    "replicas could sum"
)


class Synthesis:
    """Guesses and learns; labels are shown to the synthesiser only if they are classes.

    **Arguments:** `net`: a module with `forward(h, target)` and `loss(h, target, gradient)`, and its optimizer.
    """

    def __init__(self, net: Trained) -> None:
        self.net = net

    @torch.no_grad()
    def guess(self, h: Tensor, target: Any) -> Tensor:
        """The gradient of the loss at `h`, as far as is known."""
        found: Tensor = self.net.module(h.detach(), _classes(target))
        return found

    def learn(self, h: Tensor, target: Any, gradient: Tensor) -> None:
        """Learn that the gradient was this."""
        loss: Tensor = self.net.module.loss(h.detach(), _classes(target), gradient)  # type: ignore[operator]
        loss.backward()  # type: ignore[no-untyped-call]
        self.net.update()


def _classes(target: Any) -> Tensor | None:
    plain = isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()
    return target if plain else None
