"""Whoever wants to look over a stage's shoulder, such as a probe of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..nn.tree import Tree
from ..transport.mail import Micro

if TYPE_CHECKING:
    from .stage import Stage

__all__ = ["Observer"]


class Observer(Protocol):
    """Called by a stage; must leave everything as it is."""

    def forward(self, stage: Stage, micro: Micro, inputs: Tree, target: Tree) -> None:
        """A forward begins; the stage's parameters show the weights that it will see."""

    def update(self, stage: Stage, batches: int) -> None:
        """Gradients of `batches` batches, summed in `.grad`, are about to be applied."""
