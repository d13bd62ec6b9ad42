"""From places to slots: when each task is due, and how late each layer's gradient comes.

Mini-batch `t` executes task `v` in slot `t + r(v)`. Whatever crosses from one processor to another takes one slot, so
each slot is one step of a systolic machine: compute, exchange, next. A layer's gradient is then `r(G) - r(F)` updates
old.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .tasks import Task, TaskKind

__all__ = ["Delays", "by_task", "delays", "retime", "sources"]


class Delays(NamedTuple):
    """What follows from the slots, one entry per layer."""

    #: Updates between the weights that a gradient is taken at and those that it changes.
    gradient: tuple[int, ...]
    #: Slots for which a version of the weights is kept for D.
    weight_stash: tuple[int, ...]
    #: Slots for which the input of the layer is kept for G.
    activation: tuple[int, ...]


def by_task(tasks: Iterable[Task]) -> dict[tuple[TaskKind, int], list[Task]]:
    """All shares of each task."""
    shares: dict[tuple[TaskKind, int], list[Task]] = {}
    for task in tasks:
        shares.setdefault((task.kind, task.layer), []).append(task)
    return shares


def sources(kind: TaskKind, layer: int, layers: int, has_factor: bool) -> tuple[TaskKind, int] | None:
    """The task whose result a task must wait for; activations and weights come earlier in any case.

    >>> sources("G", 2, 4, False), sources("D", 3, 4, False)
    (('D', 3), ('F', 3))
    """
    if kind == "F":
        return ("F", layer - 1) if layer else None
    if layer == layers - 1:
        return ("F", layer)
    if kind != "H" and has_factor:
        return ("H", layer)
    return ("D", layer + 1)


def retime(placed: Sequence[Task], layers: int) -> list[Task]:
    """Give every share the earliest slot in which all it needs has arrived; the order is kept.

    >>> from fractions import Fraction
    >>> one = Fraction(1)
    >>> placed = [Task("F", 0, 0, one), Task("G", 0, 0, one), Task("D", 1, 1, one), Task("F", 1, 1, one),
    ...     Task("G", 1, 1, one)]
    >>> [task.slot for task in retime(placed, 2)]
    [0, 2, 1, 1, 1]
    """
    shares = by_task(placed)
    slots: dict[tuple[TaskKind, int], list[tuple[int, int]]] = {}
    order: list[tuple[TaskKind, int]] = [("F", layer) for layer in range(layers)]
    for layer in reversed(range(layers)):
        order += [("H", layer), ("D", layer), ("G", layer)]
    for key in order:
        if key not in shares:
            continue
        source = sources(*key, layers, ("H", key[1]) in shares)
        before = slots[source] if source is not None else []
        slots[key] = [
            (share.processor, max((slot + (place != share.processor) for place, slot in before), default=0))
            for share in shares[key]
        ]
    found = {(key, place): slot for key, places in slots.items() for place, slot in places}
    return [task._replace(slot=found[(task.kind, task.layer), task.processor]) for task in placed]


def delays(tasks: Sequence[Task], layers: int) -> Delays:
    """Read delays and buffers off the slots.

    >>> from fractions import Fraction
    >>> one = Fraction(1)
    >>> delays([Task("F", 0, 0, one, 0), Task("G", 0, 0, one, 2)], 1)
    Delays(gradient=(2,), weight_stash=(0,), activation=(2,))
    """
    shares = by_task(tasks)
    forward = [shares["F", layer][0] for layer in range(layers)]
    weight = [shares["G", layer][0] for layer in range(layers)]
    stash = [
        max((share.slot - forward[layer].slot for share in shares.get(("D", layer), [])), default=0)
        for layer in range(layers)
    ]
    kept = []
    for layer in range(layers):
        # The data of the first layer arrive where and when its forward runs.
        source = forward[max(0, layer - 1)]
        kept.append(weight[layer].slot - source.slot - (source.processor != weight[layer].processor))
    gradient = tuple(g.slot - f.slot for f, g in zip(forward, weight, strict=True))
    return Delays(gradient, tuple(stash), tuple(kept))
