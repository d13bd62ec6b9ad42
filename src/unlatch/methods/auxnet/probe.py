"""How much a stage's local gradient has in common with that of backpropagation, at the same weights and batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.randomness import replayable
from ...nn.statistics import frozen_statistics
from ...rules.losses import measured
from ...runtime.stage import Stage
from ...transport.mail import Micro
from ..local.statistics import MOST_RECORDS
from .sources import Raw

__all__ = ["GradientProbe", "cosine", "serial_gradients"]


def serial_gradients(stages: Sequence[Stage], micro: Micro, raw: Raw) -> list[list[Tensor]]:
    """The gradients of backpropagation for every stage; nothing of the stages is changed."""
    x: Any = raw.x
    for stage in stages:
        with replayable(stage.options.draws, stage.index, micro.id), frozen_statistics(stage.module):
            x = stage.module(x)
    loss, _ = measured(stages[-1].options.loss_fn(x, raw.y))
    wanted = [p for stage in stages for p in stage.params]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    return [[next(found) for _ in stage.params] for stage in stages]


def cosine(a: Sequence[Tensor | None], b: Sequence[Tensor]) -> tuple[float, float]:
    """The cosine of two lists of gradients as one vector each, and the ratio of their lengths; 0 where one is zero.

    >>> cosine([torch.ones(2), None], [torch.ones(2), torch.zeros(3)])
    (1.0, 1.0)
    """
    pairs = [(torch.zeros_like(v) if u is None else u, v) for u, v in zip(a, b, strict=True)]
    product = sum(float((u.double() * v.double()).sum()) for u, v in pairs)
    left = sum(float(u.double().square().sum()) for u, _ in pairs) ** 0.5
    right = sum(float(v.double().square().sum()) for _, v in pairs) ** 0.5
    if left == 0.0 or right == 0.0:
        return 0.0, 0.0
    return round(product / (left * right), 12), left / right


class GradientProbe:
    """Compares, at the updates that the schedule says. Needs the whole network in one process.

    **Arguments:** `stages`: all of them.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = [stages[index] for index in sorted(stages)]
        #: Per stage: update, cosine with the gradient of backpropagation, ratio of norms.
        self.found: dict[int, deque[tuple[int, float, float]]] = {i: deque(maxlen=MOST_RECORDS) for i in stages}
        self._known: tuple[int, list[list[Tensor]]] | None = None

    def compare(self, stage: int, micro: Micro, raw: Raw) -> None:
        """Compare the gradient that a stage is about to apply, before any stage applies its own."""
        if self._known is None or self._known[0] != micro.id:
            self._known = micro.id, serial_gradients(self._stages, micro, raw)
        local = [p.grad for p in self._stages[stage].params]
        self.found[stage].append((micro.update, *cosine(local, self._known[1][stage])))
