"""What a model that was written elsewhere must tell before it can be trained by stages as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..metrics import Metric
from .huggingface import HuggingFace
from .tree import Tree

__all__ = ["Foreign", "foreign"]


class Foreign(Protocol):
    """A model of another library, seen as a chain of blocks that it does not list itself."""

    def blocks(self) -> Sequence[tuple[str, nn.Module]]:
        """Modules whose composition is the model, with the names of what they run; made of the model's own parts."""

    def taken_apart(self, batch: Mapping[str, Any] | tuple[Any, Any], *, own_loss: bool = True) -> tuple[Tree, Tree]:
        """What enters the first block and what the loss compares with, from a batch as the library's users have it.

        **Arguments:** `own_loss`: whether that will be the model's own loss, which wants labels of a certain shape.
        """

    @property
    def loss(self) -> Any:
        """The model's own loss, from output and target to `(sum, count)`; `None` if it has none."""

    @property
    def metrics(self) -> Sequence[Metric] | None:
        """What can be measured of outputs and targets beside that loss; `None` where nothing special fits."""

    def output(self, x: Tree) -> Tree:
        """What the model itself makes of that input: the blocks must make the same of it."""

    def own_loss(self, x: Tree, y: Tree) -> Tensor | None:
        """The mean that the model itself computes: `loss` must give the same."""


def foreign(model: Any) -> Foreign | None:
    """Find out whether a model comes from a library that is known here, without importing that library.

    >>> foreign(nn.Linear(1, 1)) is None
    True
    """
    for kind in type(model).__mro__:
        if kind.__name__ == "PreTrainedModel" and kind.__module__.partition(".")[0] == "transformers":
            return HuggingFace(model)
    return None
