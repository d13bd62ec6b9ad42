"""Costs on a systolic array: each task is a matrix product, cut into tiles of the size of the array.

F and D keep weights in the array and let activations pass (weight-stationary), G keeps its result in place and lets
both factors pass (output-stationary). A tile takes `2R + C + T - 2` cycles, T being the length of what passes; this is
the model of SCALE-Sim. With it the three tasks of a layer differ, most of all where mini-batches are small.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from .layer_costs import LayerCost, as_chain
from .networks import LayerShape

__all__ = ["output_stationary", "systolic_costs", "weight_stationary"]


def weight_stationary(m: int, k: int, n: int, rows: int, columns: int) -> int:
    """Cycles of an (m x k) by (k x n) product whose first factor stays in the array.

    >>> weight_stationary(4, 4, 10, 4, 4)
    20
    """
    return -(-k // rows) * -(-m // columns) * (2 * rows + columns + n - 2)


def output_stationary(m: int, k: int, n: int, rows: int, columns: int) -> int:
    """Cycles of an (m x k) by (k x n) product whose result stays in the array.

    >>> output_stationary(4, 10, 4, 4, 4)
    20
    """
    return -(-m // rows) * -(-n // columns) * (2 * rows + columns + k - 2)


def systolic_costs(
    shapes: Sequence[LayerShape], *, batch: int = 1, rows: int = 128, columns: int = 128, bytes_per_number: int = 4
) -> list[LayerCost]:
    """Cycles of F, D and G on an array of `rows` x `columns`; the groups of a convolution run one after the other.

    >>> [(layer.F, layer.D, layer.G) for layer in systolic_costs([LayerShape("fc", 8, 4)] * 2, rows=4, columns=4)]
    [(22, 0, 22), (22, 22, 22)]
    """
    if min(batch, rows, columns) < 1:
        raise PlanError(f"expected positive sizes, got batch={batch}, rows={rows}, columns={columns}")
    costs = []
    for shape in shapes:
        outputs, inputs = shape.channels_out // shape.groups, shape.channels_in // shape.groups
        pixels_out, pixels_in = batch * shape.size_out**2, batch * shape.size_in**2
        taps = shape.kernel**2
        forward = weight_stationary(outputs, inputs * taps, pixels_out, rows, columns)
        input_gradient = weight_stationary(inputs, outputs * taps, pixels_in, rows, columns)
        weight_gradient = output_stationary(outputs, pixels_out, inputs * taps, rows, columns)
        costs.append(
            LayerCost(
                shape.name,
                shape.groups * forward,
                shape.groups * input_gradient,
                shape.groups * weight_gradient,
                activation_bytes=batch * shape.sent * bytes_per_number,
                weight_bytes=shape.weights * bytes_per_number,
            )
        )
    return as_chain(costs)
