"""Methods that keep the forward lock: the whole network runs forward, then all stages go backward on older batches."""

from __future__ import annotations

from dataclasses import dataclass

from ..rules.activations import Graph, Input
from ..rules.bundle import Rules
from ..rules.weights import Stash
from ..schedule import Schedule, forward_locked
from .base import Delayed, register

__all__ = ["DDG", "FR"]


@register
@dataclass(frozen=True)
class DDG(Delayed):
    """Decoupled delayed gradients (Huo et al. 2018): the graph of batch t-(K-k) is kept for its late cotangent."""

    name = "ddg"
    summary = "forward locked, delay K-k, graphs kept"

    def schedule(self, stages: int) -> Schedule:
        return forward_locked(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), Stash())


@register
@dataclass(frozen=True)
class FR(Delayed):
    """Features replay (Huo et al. 2018): only inputs are kept, the graph is rebuilt at the current weights."""

    name = "fr"
    summary = "forward locked, delay K-k, inputs kept and replayed"

    def schedule(self, stages: int) -> Schedule:
        return forward_locked(stages)

    def rules(self) -> Rules:
        return self._rules(Input())
