"""A LayerPipe plan in virtual time: its tasks with all that they wait for, weights and gradients included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import cast

from ..schedule.entries import Kind
from ..schedule.simulation import Simulation
from ..schedule.simulator_slots import SlotEdge, SlotTask, simulate_slots
from ..schedule.simulator_stages import Machine
from .layerpipe import PlannedTasks, task_size
from .retiming import sources
from .tasks import Task, TaskKind

__all__ = ["simulate_layerpipe", "slot_edges", "slot_tasks"]

_KINDS: dict[TaskKind, Kind] = {"F": Kind.F, "D": Kind.I, "H": Kind.I, "G": Kind.W}
_TURN: dict[TaskKind, int] = {"H": 0, "D": 1, "G": 2}


def simulate_layerpipe(
    plan: PlannedTasks, batches: int, machine: Machine | None = None, *, exact: bool = True
) -> Simulation:
    """Run a plan, self-timed: each processor keeps the order of the slots but does not wait for their end.

    **Arguments:**

    - `batches`: mini-batches.
    - `machine`: speeds, links, jitter; by default the links of the plan.
    - `exact`: count in fractions if the plan does; otherwise in floats, which is faster.

    >>> from .layer_costs import LayerCost
    >>> from .layerpipe import plan_layerpipe
    >>> run = simulate_layerpipe(plan_layerpipe([LayerCost("", 1, 1, 1)] * 4, 4), 34)
    >>> float(run.makespan), float(run.interval)
    (97.75, 2.75)
    """
    inputs = [0, *(layer.activation_bytes for layer in plan.layers[:-1])]
    pairs = zip(plan.layers, inputs, strict=True)
    return simulate_slots(
        slot_tasks(plan, exact),
        list(slot_edges(plan)),
        batches=batches,
        devices=plan.devices,
        machine=machine or Machine(plan.channel),
        kept_bytes=[float(size if layer.kept_bytes is None else layer.kept_bytes) for layer, size in pairs],
        delays=plan.delays.gradient,
    )


def slot_tasks(plan: PlannedTasks, exact: bool = True) -> list[SlotTask]:
    """The tasks in an order in which none comes before what it needs."""
    rational = exact and isinstance(plan.initiation_interval, Fraction)
    tasks = []
    for task in _ordered(plan):
        size = task_size(plan.layers, plan.mode, task)
        time = cast(float, size) if rational else float(size)
        tasks.append(SlotTask(_KINDS[task.kind], task.layer, task.processor, time, task.slot))
    return tasks


def slot_edges(plan: PlannedTasks) -> Iterator[SlotEdge]:
    """All that the tasks need, numbered as in `slot_tasks`.

    A tensor that several tasks of one processor need is sent there once; the others only wait for it.
    """
    tasks = _ordered(plan)
    shares: dict[tuple[TaskKind, int], list[int]] = {}
    for number, task in enumerate(tasks):
        shares.setdefault((task.kind, task.layer), []).append(number)
    sent: set[tuple[str, int, int]] = set()
    for target, task in enumerate(tasks):
        for what, key, size, tokens in _needs(plan, task, shares):
            for source in shares[key]:
                message = (what, source, task.processor)
                whole = size * float(tasks[source].fraction)
                yield SlotEdge(source, target, 0 if message in sent else whole, tokens)
                sent.add(message)


def _needs(
    plan: PlannedTasks, task: Task, shares: Mapping[tuple[TaskKind, int], list[int]]
) -> Iterator[tuple[str, tuple[TaskKind, int], float, int]]:
    """What a task waits for: a name for the tensor, the task that makes it, its bytes, how many mini-batches before."""
    kind, layer, layers = task.kind, task.layer, plan.layers
    output, weights = float(layers[layer].activation_bytes), float(layers[layer].weight_bytes)
    below = float(layers[layer - 1].activation_bytes) if layer else 0.0
    source = sources(kind, layer, len(layers), ("H", layer) in shares)
    if source is not None:
        yield ("activation", source, below, 0) if kind == "F" else ("gradient", source, output, 0)
    if kind == "F":
        yield "update", ("G", layer), weights, 1 + plan.delays.gradient[layer]
    elif kind == "H":
        yield "activation", ("F", layer), output, 0
    elif kind == "D":
        yield "weights", ("F", layer), weights * float(task.fraction), 0
    if layer and (kind == "G" or (kind == "D" and ("H", layer - 1) not in shares)):
        yield "activation", ("F", layer - 1), below, 0


def _ordered(plan: PlannedTasks) -> list[Task]:
    """Forwards upwards, then the rest downwards."""
    up = sorted((t for t in plan.tasks if t.kind == "F"), key=lambda t: t.layer)
    down = sorted((t for t in plan.tasks if t.kind != "F"), key=lambda t: (-t.layer, _TURN[t.kind]))
    return up + down
