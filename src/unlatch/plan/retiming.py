"""From places to slots: when each task is due, and how late each layer's gradient comes.

Mini-batch `t` executes task `v` in slot `t + r(v)`. Whatever crosses from one device to another takes one slot, so
each slot is one step of a systolic machine: compute, exchange, next. A layer's gradient is then `r(G) - r(F)` updates
old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .dataflow import Dataflow, Work
from .tasks import Task, TaskKind, by_task

__all__ = ["Delays", "delays", "retime"]

_TASKS: dict[Work, TaskKind] = {"forward": "F", "elementwise": "H", "input_gradient": "D", "weight_gradient": "G"}


class Delays(NamedTuple):
    """What follows from the slots, one entry per layer."""

    #: Updates between the weights that a gradient is taken at and those that it changes.
    gradient: tuple[int, ...]
    #: Slots for which a version of the weights is kept for D.
    weight_stash: tuple[int, ...]
    #: Slots for which the input of the layer is kept for G.
    activation: tuple[int, ...]


def retime(placed: Sequence[Task], layers: int) -> list[Task]:
    """Give every share the earliest slot in which all it needs has arrived; the order is kept.

    >>> from fractions import Fraction
    >>> one = Fraction(1)
    >>> placed = [Task("F", 0, 0, one), Task("G", 0, 0, one), Task("D", 1, 1, one), Task("F", 1, 1, one),
    ...     Task("G", 1, 1, one)]
    >>> [task.slot for task in retime(placed, 2)]
    [0, 2, 1, 1, 1]
    """
    made: dict[str, tuple[int, int]] = {}
    slots: dict[tuple[TaskKind, int, int], int] = {}
    for step in Dataflow(placed, layers).steps:
        if step.work not in _TASKS:
            # Weights are there in any case: they leave home after the forward, and nobody waits for a gradient of them.
            continue
        at = step.place.device
        needed = [made[tensor] for tensor in step.uses if tensor in made]
        slot = max((slot + (place != at) for place, slot in needed), default=0)
        slots[_TASKS[step.work], step.layer, at] = slot
        made.update(dict.fromkeys(step.makes, (at, slot)))
    return [task._replace(slot=slots[task.kind, task.layer, task.device]) for task in placed]


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
        kept.append(weight[layer].slot - source.slot - (source.device != weight[layer].device))
    gradient = tuple(g.slot - f.slot for f, g in zip(forward, weight, strict=True))
    return Delays(gradient, tuple(stash), tuple(kept))
