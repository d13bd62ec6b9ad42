"""From costs to tasks that can be executed: the planner's placement, adapted to what the layers of a model allow.

Only linear maps can share an input gradient by rows or hand a gradient away for free. Any other layer is run forward
again wherever else one of its gradients is computed. So several placements are judged with that forward charged, and
the simplest of the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from ...errors import PlanError
from ...plan.dataflow import Dataflow, layer_kinds
from ...plan.layer_costs import LayerCost, as_chain, exact
from ...plan.layer_groups import Span
from ...plan.layerpipe import PlannedTasks, assemble, plan_layerpipe
from ...plan.partition import contiguous_split
from ...plan.plan import Plan
from ...plan.retiming import retime
from ...plan.tasks import Mode, Task, by_task, check_mode

__all__ = [
    "charged_loads",
    "executable",
    "merge_whole_layers",
    "place_layers",
    "place_tasks",
    "shift_weight_gradients",
    "whole_layers",
]

#: A placement with fewer messages wins if its interval is longer by no more than this.
_TOLERANCE = Fraction(102, 100)


def place_tasks(
    costs: Sequence[LayerCost],
    devices: int,
    mode: str,
    linear: Sequence[bool],
) -> tuple[PlannedTasks, list[Fraction], str]:
    """The placement to execute.

    **Arguments:** `linear`: which layers are linear maps.

    **Returns:** the plan, the loads with second forwards charged, and a sentence about them if there are any.

    >>> plan, loads, _ = place_tasks([LayerCost("", 1, 1, 1)] * 4, 2, "divisible", [True] * 4)
    >>> plan.initiation_interval, plan.delays.gradient
    (Fraction(11, 2), (2, 2, 0, 0))
    """
    chain = as_chain(costs)
    how = check_mode(mode)
    judged = []
    for plan in _candidates(chain, devices, how, linear):
        loads = charged_loads(plan, linear)
        judged.append((max(loads), plan, loads))
    best = min(interval for interval, *_ in judged)
    _, plan, loads = next(found for found in judged if found[0] <= _TOLERANCE * best)
    extra = sum(loads, Fraction(0)) - sum((exact(load) for load in plan.loads), Fraction(0))
    share = float(extra / sum(loads, Fraction(0)))
    note = f"layers that are not linear maps run forward again elsewhere: {share:.0%} of all work" if extra else ""
    return plan, loads, note


def _candidates(chain: Sequence[LayerCost], devices: int, mode: Mode, linear: Sequence[bool]) -> Iterator[PlannedTasks]:
    """Simplest first."""
    if devices <= len(chain):
        starts = contiguous_split([float(layer.work) for layer in chain], devices)
        yield assemble(chain, devices, mode, whole_layers(starts, len(chain)))
    if mode == "divisible":
        yield plan_layerpipe(chain, devices, "atomic")
    plan = plan_layerpipe(chain, devices, mode)
    yield plan if mode != "divisible" else _undivided(plan, linear)


def whole_layers(starts: Sequence[int], layers: int) -> list[Task]:
    """All tasks of a layer on one device; `starts` are the first layers of the devices."""
    one = Fraction(1)
    homes = [sum(start <= layer for start in starts) - 1 for layer in range(layers)]
    tasks: list[Task] = []
    for layer, home in enumerate(homes):
        tasks += [Task("D", layer, home, one)] if layer else []
        tasks += [Task("F", layer, home, one), Task("G", layer, home, one)]
    return tasks


def _undivided(plan: PlannedTasks, linear: Sequence[bool]) -> PlannedTasks:
    """Give the D of layers whose rows depend on each other to the device that has most of it."""
    shares = by_task(plan.tasks)
    placed: list[Task] = []
    for task in plan.tasks:
        if task.kind != "D" or linear[task.layer]:
            placed.append(task)
        elif task == max(shares["D", task.layer], key=lambda share: share.fraction):
            placed.append(task._replace(fraction=Fraction(1)))
    return assemble(plan.layers, plan.devices, plan.mode, placed)


def charged_loads(plan: PlannedTasks, linear: Sequence[bool]) -> list[Fraction]:
    """Loads, with the forwards that layers other than linear maps run again away from home."""
    loads = [exact(load) for load in plan.loads]
    for layer, device in Dataflow(plan.tasks, len(plan.layers), layer_kinds(plan.tasks, linear)).repeated_forwards():
        loads[device] += exact(plan.layers[layer].F)
    return loads


def executable(
    plan: PlannedTasks,
    names: Sequence[str],
    spans: Sequence[Span],
    parameters: Sequence[int],
    *,
    loads: Sequence[Fraction] | None = None,
    extra_delay: int = 0,
    measured: bool = False,
    note: str = "",
) -> Plan:
    """A placement as a plan for a model.

    **Arguments:**

    - `names`, `spans`: of the blocks, and which of them form each layer.
    - `parameters`: of each layer.
    - `loads`: of the devices, if not the plan's own.
    - `extra_delay`: slots by which weight gradients come later.
    """
    if len(spans) != len(plan.layers):
        raise PlanError(f"the plan is for {len(plan.layers)} layers, the model has {len(spans)}")
    tasks, groups = merge_whole_layers(shift_weight_gradients(plan.tasks, extra_delay), len(plan.layers))
    return Plan(
        blocks=tuple(names),
        starts=tuple(spans[first][0] for first, _ in groups),
        loads=tuple(float(load) for load in (plan.loads if loads is None else loads)),
        parameters=tuple(sum(parameters[first:end]) for first, end in groups),
        measured=measured,
        note=note,
        tasks=tuple(tasks),
        method=plan.plan.method,
        options=plan.plan.options,
        analysis=plan.plan.analysis,
    ).check()


def place_layers(given: Plan, mode: str, extra_delay: int = 0) -> Plan:
    """A cut as a plan of tasks: whole layers, one per device, where the user said that they begin."""
    layers = len(given.starts)
    tasks = shift_weight_gradients(retime(whole_layers(range(layers), layers), layers), extra_delay)
    return replace(given, tasks=tuple(tasks), border_bytes=(), options={"mode": mode}).check()


def merge_whole_layers(tasks: Sequence[Task], layers: int) -> tuple[list[Task], list[Span]]:
    """Make one layer of neighbours all of whose tasks are on one device: it treats them as one anyway.

    **Returns:** the tasks of the merged layers, and which layers each of them consists of.

    >>> one = Fraction(1)
    >>> rows = [("F", 0, 0, 0), ("G", 0, 0, 2), ("D", 1, 0, 2), ("F", 1, 0, 0), ("G", 1, 0, 2), ("D", 2, 1, 1),
    ...     ("F", 2, 1, 1), ("G", 2, 1, 1)]
    >>> merged, spans = merge_whole_layers([Task(kind, l, p, one, slot) for kind, l, p, slot in rows], 3)
    >>> spans, [(task.kind, task.layer, task.slot) for task in merged]
    ([(0, 2), (2, 3)], [('F', 0, 0), ('G', 0, 2), ('D', 1, 1), ('F', 1, 1), ('G', 1, 1)])
    """
    places = [{task.device for task in tasks if task.layer == layer} for layer in range(layers)]
    whole = [len(place) == 1 for place in places]
    spans: list[Span] = []
    for layer in range(layers):
        if layer and whole[layer] and whole[layer - 1] and places[layer] == places[layer - 1]:
            spans[-1] = (spans[-1][0], layer + 1)
        else:
            spans.append((layer, layer + 1))
    merged: list[Task] = []
    for task in tasks:
        number, (start, _) = next((n, s) for n, s in enumerate(spans) if s[0] <= task.layer < s[1])
        # Inside of a whole layer there is nothing to hand over, and it applies its own elementwise factors.
        inner = whole[task.layer] and (task.kind == "H" or task.layer > start)
        if not inner:
            merged.append(task._replace(layer=number))
    return merged, spans


def shift_weight_gradients(tasks: Sequence[Task], slots: int) -> list[Task]:
    """Let every weight gradient come later by some slots; nobody waits for it."""
    return [task._replace(slot=task.slot + slots) if task.kind == "G" else task for task in tasks]
