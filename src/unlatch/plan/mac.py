"""Costs by counting: every task of a layer takes its multiply-accumulates over the number of processing elements."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from .layer_costs import LayerCost, as_chain
from .networks import LayerShape

__all__ = ["mac_costs"]


def mac_costs(
    shapes: Sequence[LayerShape], *, batch: int = 1, elements: int = 1, bytes_per_number: int = 4
) -> list[LayerCost]:
    """Cycles of F, D and G, all the same: `ceil(MAC / elements)`.

    **Arguments:**

    - `shapes`: of the layers, in order.
    - `batch`: samples of a mini-batch.
    - `elements`: multiply-accumulates that a processor does per cycle.
    - `bytes_per_number`: size of activations and weights.

    >>> mac_costs([LayerShape("fc", 10, 10)], batch=2, elements=3)[0].F
    67
    """
    if min(batch, elements) < 1:
        raise PlanError(f"expected at least 1 sample and 1 processing element, got batch={batch}, elements={elements}")
    costs = []
    for shape in shapes:
        cycles = -(-batch * shape.macs // elements)
        sent, weights = batch * shape.sent * bytes_per_number, shape.weights * bytes_per_number
        costs.append(LayerCost(shape.name, cycles, cycles, cycles, sent, weights))
    return as_chain(costs)
