"""Methods that give exactly the gradient of backpropagation: sequential, GPipe, 1F1B, zero bubble."""

from __future__ import annotations

from dataclasses import dataclass

from ..rules.bundle import Rules
from ..schedule import flushed as orders
from ..schedule.entries import Schedule
from .base import Method, register

__all__ = ["BP", "ZBH1", "ZBH2", "GPipe", "OneFOneB"]


@register
@dataclass(frozen=True)
class BP(Method):
    """Plain backpropagation: one batch at a time, all other stages wait.

    >>> BP().schedule(2).flushes
    True
    """

    name = "bp"
    summary = "one batch at a time; the reference"

    def schedule(self, stages: int) -> Schedule:
        return orders.Sequential(stages)

    def rules(self) -> Rules:
        return Rules()


@dataclass(frozen=True)
class _Flushed(Method):
    def rules(self) -> Rules:
        return Rules()

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        """Twice the stages: a third of the time or less goes to filling and emptying the pipeline."""
        wanted = 2 * stages if stages > 1 else 1
        return wanted if batch_size is None else max(1, min(wanted, batch_size))


@register
@dataclass(frozen=True)
class GPipe(_Flushed):
    """All micro-batches forward, then all backward, then one update (Huang et al. 2019)."""

    name = "gpipe"
    summary = "all micro-batches forward, all backward, one update"

    def schedule(self, stages: int) -> Schedule:
        return orders.GPipe(stages)


@register
@dataclass(frozen=True)
class OneFOneB(_Flushed):
    """One forward, one backward with a flush: GPipe's result with fewer activations kept."""

    name = "1f1b"
    summary = "one forward, one backward, flush; fewer activations than gpipe"

    def schedule(self, stages: int) -> Schedule:
        return orders.OneFOneB(stages)


@register
@dataclass(frozen=True)
class ZBH1(_Flushed):
    """Zero bubble, handcrafted 1: weight gradients fill the gaps, memory of 1F1B (Qi et al. 2024)."""

    name = "zb-h1"
    summary = "backward in two halves, weight gradients fill the gaps"

    def schedule(self, stages: int) -> Schedule:
        return orders.ZBH1(stages)


@register
@dataclass(frozen=True)
class ZBH2(_Flushed):
    """Zero bubble, handcrafted 2: no gaps once there are 2K-1 micro-batches, twice the activations."""

    name = "zb-h2"
    summary = "no gaps from 2K-1 micro-batches on, twice the activations"

    def schedule(self, stages: int) -> Schedule:
        return orders.ZBH2(stages)
