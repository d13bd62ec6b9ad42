"""Where to cut for AuxNet: a stage pays for its blocks and for the network that predicts its input.

The first stage needs no prediction and later ones need larger ones, so later stages should have fewer blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from ...errors import PlanError
from ...nn.auxiliary import measure_blocks
from ...nn.chain import Block
from ...nn.tree import Tree
from ...plan.profile import BlockCost, profile

__all__ = ["auxnet_split", "auxnet_starts", "prediction_costs"]


def prediction_costs(costs: Sequence[float], shapes: Sequence[object], depth: int = 1) -> list[float]:
    """For every block, the cost of an automatic AuxNet that predicts its input.

    **Arguments:**

    - `costs`: of the blocks.
    - `shapes`: of their outputs.
    - `depth`: blocks taken of every run of equal shapes, after the first block of the chain.

    >>> prediction_costs([1, 2, 2, 2, 3], ["a", "a", "a", "b", "b"])
    [0.0, 1.0, 3.0, 3.0, 5.0]
    """
    found, total, taken = [0.0], 0.0, 0
    run: object = None
    for position, (cost, shape) in enumerate(zip(costs, shapes, strict=True)):
        if position == 0:
            total += cost
        else:
            taken = taken + 1 if position > 1 and shape == run else 1
            total += cost if taken <= depth else 0.0
            run = shape
        found.append(total)
    return found[:-1]


def auxnet_starts(costs: Sequence[float], predictions: Sequence[float], stages: int) -> list[int]:
    """The cut whose dearest stage is cheapest, by dynamic programming over all cuts.

    >>> auxnet_starts([1, 1, 1, 1, 1, 1], [0, 2, 2, 2, 2, 2], 2)
    [0, 4]
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise PlanError(f"{count} blocks can be cut into 1 to {count} stages, not {stages}: every stage needs a block")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The dearest of `left` stages over the blocks from `start` on, and where they start."""
        own = predictions[start] - sums[start]
        if left == 1:
            return own + sums[count], (start,)
        found = []
        for end in range(start + 1, count - left + 2):
            rest, starts = best(end, left - 1)
            found.append((max(own + sums[end], rest), (start, *starts)))
        return min(found)

    return list(best(0, stages)[1])


def auxnet_split(
    blocks: Sequence[Block], x: Tree, stages: int, depth: int = 1, costs: Sequence[BlockCost] | None = None
) -> list[str]:
    """Names of the blocks that start the second and later stages, for `split`.

    **Arguments:**

    - `x`: one batch, with which the blocks are measured unless `costs` are given.

    >>> from torch import nn, randn
    >>> from unlatch.nn.chain import chain
    >>> len(auxnet_split(chain([nn.Linear(8, 8) for _ in range(8)]), randn(4, 8), 2))
    1
    """
    measured = costs if costs is not None else profile(blocks, x)
    seconds = [cost.forward + cost.input_grad + cost.weight_grad for cost in measured]
    outputs = measure_blocks(blocks, x)
    shapes = [tuple(out.shape[1:]) if isinstance(out, Tensor) else None for out in outputs]
    starts = auxnet_starts(seconds, prediction_costs(seconds, shapes, depth), stages)
    return [blocks[start].name for start in starts[1:]]
