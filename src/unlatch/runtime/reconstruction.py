"""How well reversible stages reconstruct their inputs, measured now and then on a few numbers of the true one."""

from __future__ import annotations

from collections import deque
from statistics import median

from torch import Tensor

from ..nn.inverse_check import relative_error
from ..nn.tree import Tree, map_tensors

__all__ = ["Reconstruction"]

#: Micro-batches between two measurements; the first ones come after 1, 2, 4, 8, ...
EVERY = 50
#: Numbers of each tensor that are kept for a measurement; of smaller tensors all.
NUMBERS = 4096


class Reconstruction:
    """The measurements of one stage: relative errors `|found - true| / |true|`, of the worse of the two streams.

    >>> import torch
    >>> found = Reconstruction()
    >>> kept = found.sample(0, torch.ones(3))
    >>> found.compare(0, kept, torch.tensor([1.0, 1.0, 1.3]))
    >>> round(found.worst, 3), round(found.usual, 3), len(found.history)
    (0.173, 0.173, 1)
    """

    def __init__(self) -> None:
        #: Pairs (micro-batch, error), newest last.
        self.history: deque[tuple[int, float]] = deque(maxlen=1000)
        self.worst = 0.0

    @property
    def usual(self) -> float | None:
        """The median of the later half of all measurements: the first ones are made before the weights have moved."""
        errors = [error for _, error in self.history]
        return median(errors[len(errors) // 2 :]) if errors else None

    def sample(self, micro: int, inputs: Tree) -> Tree:
        """What to keep of the true input until its reconstruction comes; `None` if this micro-batch is not measured."""
        if micro % EVERY and micro & (micro - 1):
            return None
        return map_tensors(_thinned, inputs)

    def compare(self, micro: int, kept: Tree, found: Tree) -> None:
        """Compare a reconstruction with what was kept, if anything was."""
        if kept is not None:
            error = relative_error(map_tensors(_thinned, found), kept)
            self.history.append((micro, error))
            self.worst = max(self.worst, error)


def _thinned(t: Tensor) -> Tensor:
    """Evenly spread numbers; an odd stride does not fall into step with channels and rows."""
    return t.detach().flatten()[:: t.numel() // NUMBERS | 1].clone()
