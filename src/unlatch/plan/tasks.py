"""The tasks of a chain of layers, in the order in which neighbouring tasks share the most data.

The order is `F1 G1 | D2 | F2 G2 | D3 | ...`: the gradient of a layer's input stands between that layer and the one
below, because it may be computed on the device of either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from ..errors import PlanError
from ..lookup import did_you_mean
from .layer_costs import LayerCost, exact

__all__ = ["MODES", "Item", "Mode", "Task", "TaskKind", "by_task", "chain_items", "check_mode"]

Mode = Literal["divisible", "atomic", "factor"]
MODES: tuple[Mode, ...] = ("divisible", "atomic", "factor")
#: H is the elementwise factor of D where it is a task of its own (mode `factor`); it belongs to the layer below.
TaskKind = Literal["F", "D", "G", "H"]


class Task(NamedTuple):
    """A share of a task of one layer on one device. Mini-batch `t` is due in slot `t + slot`."""

    kind: TaskKind
    layer: int
    device: int
    fraction: Fraction
    slot: int = 0


class Item(NamedTuple):
    """What a device takes as a whole, or, if divisible, in parts: one task, or two that stay together."""

    tasks: tuple[tuple[TaskKind, int], ...]
    size: Fraction
    divisible: bool


def by_task(tasks: Iterable[Task]) -> dict[tuple[TaskKind, int], list[Task]]:
    """All shares of each task."""
    shares: dict[tuple[TaskKind, int], list[Task]] = {}
    for task in tasks:
        shares.setdefault((task.kind, task.layer), []).append(task)
    return shares


def check_mode(mode: str) -> Mode:
    """The mode if it is one.

    >>> check_mode("atomic")
    'atomic'
    """
    for known in MODES:
        if mode == known:
            return known
    raise PlanError(f"unknown mode {mode!r}.{did_you_mean(mode, MODES)} Known: {', '.join(MODES)}")


def chain_items(chain: Sequence[LayerCost], mode: Mode) -> list[Item]:
    """The items of a chain, in order.

    **Arguments:**

    - `chain`: from `as_chain`.
    - `mode`: `"divisible"`: D may be shared by neighbours. `"atomic"`: D is one piece. `"factor"`: D is a matrix
      product, one piece, and an elementwise factor (`hadamard`) that is computed with the weight gradient of the layer
      below; a factor of no cost is applied wherever the gradient arrives.

    >>> ["".join(kind + str(layer) for kind, layer in item.tasks) for item in chain_items([LayerCost("", 1, 1, 1)] * 2,
    ...     "atomic")]
    ['F0', 'G0', 'D1', 'F1', 'G1']
    """
    items: list[Item] = []
    for number, layer in enumerate(chain):
        elementwise = exact(layer.hadamard) if mode == "factor" else Fraction(0)
        if number:
            if elementwise:
                below = items[-1]
                items[-1] = below._replace(tasks=(*below.tasks, ("H", number - 1)), size=below.size + elementwise)
            items.append(Item((("D", number),), exact(layer.D) - elementwise, mode == "divisible"))
        items.append(Item((("F", number),), exact(layer.F), False))
        items.append(Item((("G", number),), exact(layer.G), False))
    return items
