"""PACI: 1F1B without flush and without a stash; accumulation bounds how many versions a graph meets."""

from __future__ import annotations

from dataclasses import dataclass

from ..rules.activations import Graph
from ..rules.bundle import Rules
from ..rules.weights import Latest
from ..schedule import Schedule, one_f_one_b_async
from .base import Delayed, register

__all__ = ["PACI"]


@register
@dataclass(frozen=True)
class PACI(Delayed):
    """Kept graphs with the newest weights, one copy of the weights whatever the depth (2026).

    A backward combines the activations of its forward with the weights as they are. That is the gradient of no network;
    the fewer updates come in between, the closer it is to one. With at least K micro-batches per update, which `"auto"`
    takes (inferred: the published text says that accumulation bounds the versions crossed), no graph meets more than
    one.

    >>> method = PACI().resolve(4)
    >>> method.microbatches, method.staleness(4)
    (4, (0.75, 0.5, 0.25, 0.0))
    """

    name = "paci"
    summary = "1F1B without flush, graphs kept, newest weights, no stash"

    def schedule(self, stages: int) -> Schedule:
        return one_f_one_b_async(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), Latest())

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        return stages if batch_size is None else max(1, min(stages, batch_size))
