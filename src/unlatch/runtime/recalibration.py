"""Statistics of batch norm estimated anew on serial passes, for the time of an evaluation.

A method that shows its stages predicted inputs collects running statistics on those; the serial network sees others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ..nn.tree import Tree
from .stage import Stage

__all__ = ["recalibrating"]


class _Estimating:
    """A stage whose batch norms collect statistics while everything else behaves as in evaluation."""

    def __init__(self, stage: Stage, norms: list[_BatchNorm]) -> None:
        self._stage, self._norms = stage, norms

    @property
    def last(self) -> bool:
        return self._stage.last

    def evaluate(self, inputs: Tree) -> Tree:
        """The stage's output, normalised with the batch's own statistics."""
        module = self._stage.module
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        for norm in self._norms:
            norm.train()
        try:
            with torch.no_grad():
                return module(inputs)
        finally:
            for part, training in modes:
                part.training = training


@contextmanager
def recalibrating(stages: Mapping[int, Stage], route: Mapping[int, Any]) -> Iterator[dict[int, Any]]:
    """Forget the running statistics inside the body; run batches through what is yielded to estimate them anew.

    On the way out the old statistics are back.

    **Arguments:** `route`: the way through the network that is evaluated; statistics are those met on it.
    """
    norms = {
        index: [m for m in stage.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        for index, stage in stages.items()
    }
    listed = [norm for group in norms.values() for norm in group]
    kept = [({k: v.clone() for k, v in norm._buffers.items() if v is not None}, norm.momentum) for norm in listed]
    for norm in listed:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        estimating = {index: _Estimating(stage, norms[index]) for index, stage in stages.items()}
        yield {i: way.through(estimating[i]) if hasattr(way, "through") else estimating[i] for i, way in route.items()}
    finally:
        for norm, (buffers, momentum) in zip(listed, kept, strict=True):
            norm.momentum = momentum
            for name, value in buffers.items():
                getattr(norm, name).copy_(value)
