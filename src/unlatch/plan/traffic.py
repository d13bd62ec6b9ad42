"""What crosses between processors for one mini-batch.

Tensors: a_l (output of F_l) goes to F, G and D of the next layer; delta_l (from D of the next layer, or from the loss)
to D_l and G_l; the weights W_l from the home of F_l to D_l; the gradient of W_l from G_l back home. Data and labels are
read where they are needed, and count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from .layer_costs import LayerCost, exact
from .retiming import by_task
from .tasks import Task

__all__ = ["Tensor", "cut_bytes", "direct_bytes", "tensors"]


class Tensor(NamedTuple):
    """Parts of a tensor, as processor and bytes, and the processors that need all of them."""

    parts: list[tuple[int, Fraction]]
    needed: set[int]


def tensors(tasks: Sequence[Task], chain: Sequence[LayerCost]) -> Iterator[Tensor]:
    """All tensors that two tasks share, for one mini-batch."""
    shares = by_task(tasks)
    last = len(chain) - 1
    for layer, cost in enumerate(chain):
        activation, weight = exact(cost.activation_bytes), exact(cost.weight_bytes)
        forward, gradient = shares["F", layer], shares["G", layer]
        inputs, factor = shares.get(("D", layer), []), shares.get(("H", layer), [])
        users = _places(inputs + gradient)
        if layer < last:
            above = shares["D", layer + 1]
            # The derivative of the activation function is taken from a_l, wherever that factor is applied.
            derivative = factor or above
            yield Tensor(
                _parts(forward, activation), _places(shares["F", layer + 1] + shares["G", layer + 1] + derivative)
            )
            yield Tensor(_parts(above, activation), _places(factor) if factor else users)
            if factor:
                yield Tensor(_parts(factor, activation), users)
        else:
            yield Tensor(_parts(forward, activation), users)
        for share in inputs:
            yield Tensor(_parts(forward, weight * share.fraction), {share.processor})
        yield Tensor(_parts(gradient, weight), _places(forward))


def cut_bytes(tasks: Sequence[Task], chain: Sequence[LayerCost], processors: int) -> list[Fraction]:
    """Bytes over each border of a row of processors, where a message passes all borders on its way.

    >>> one = Fraction(1)
    >>> placed = [Task(*task, one) for task in (("F", 0, 0), ("G", 0, 0), ("D", 1, 1), ("F", 1, 1), ("G", 1, 1))]
    >>> cut_bytes(placed, [LayerCost("a", 1, 0, 1, 10, 7), LayerCost("b", 1, 1, 1, 20, 9)], 2)
    [Fraction(20, 1)]
    """
    crossing = [Fraction(0)] * (processors - 1)
    for parts, needed in tensors(tasks, chain):
        lowest, highest = min(needed), max(needed)
        for place, size in parts:
            for border in (*range(place, highest), *range(lowest, place)):
                crossing[border] += size
    return crossing


def direct_bytes(tasks: Sequence[Task], chain: Sequence[LayerCost]) -> Fraction:
    """Bytes in all if every processor sends to every other directly, once for each that needs a tensor."""
    return sum(
        (size * len(needed - {place}) for parts, needed in tensors(tasks, chain) for place, size in parts), Fraction(0)
    )


def _parts(shares: Sequence[Task], size: Fraction) -> list[tuple[int, Fraction]]:
    return [(share.processor, size * share.fraction) for share in shares]


def _places(shares: Sequence[Task]) -> set[int]:
    return {share.processor for share in shares}
