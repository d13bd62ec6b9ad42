"""From costs to tasks that can be executed: the planner's placement, adapted to what the layers of a model allow.

Only linear maps can share an input gradient by rows or hand a gradient away for free. Any other layer is run forward
again wherever else one of its gradients is computed. So several placements are judged with that forward charged, and
the simplest of the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..errors import PlanError
from .dataflow import Dataflow, layer_kinds
from .layer_costs import LayerCost, as_chain, exact
from .layerpipe import LayerPipePlan, assemble, plan_layerpipe
from .partition import contiguous_split
from .retiming import retime
from .task_plan import TaskPlan, merge_whole_layers, shift_weight_gradients
from .tasks import Mode, Task, by_task, check_mode

__all__ = ["executable", "place_layers", "place_tasks", "whole_layers"]

Span = tuple[int, int]
#: A placement with fewer messages wins if its interval is longer by no more than this.
_TOLERANCE = Fraction(102, 100)


def place_tasks(
    costs: Sequence[LayerCost],
    processors: int,
    mode: str,
    linear: Sequence[bool],
) -> tuple[LayerPipePlan, list[Fraction], str]:
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
    for plan in _candidates(chain, processors, how, linear):
        loads = charged_loads(plan, linear)
        judged.append((max(loads), plan, loads))
    best = min(interval for interval, *_ in judged)
    _, plan, loads = next(found for found in judged if found[0] <= _TOLERANCE * best)
    extra = sum(loads, Fraction(0)) - sum((exact(load) for load in plan.loads), Fraction(0))
    share = float(extra / sum(loads, Fraction(0)))
    note = f"layers that are not linear maps run forward again elsewhere: {share:.0%} of all work" if extra else ""
    return plan, loads, note


def _candidates(
    chain: Sequence[LayerCost], processors: int, mode: Mode, linear: Sequence[bool]
) -> Iterator[LayerPipePlan]:
    """Simplest first."""
    if processors <= len(chain):
        starts = contiguous_split([float(layer.work) for layer in chain], processors)
        yield assemble(chain, processors, mode, whole_layers(starts, len(chain)))
    if mode == "divisible":
        yield plan_layerpipe(chain, processors, "atomic")
    plan = plan_layerpipe(chain, processors, mode)
    yield plan if mode != "divisible" else _undivided(plan, linear)


def whole_layers(starts: Sequence[int], layers: int) -> list[Task]:
    """All tasks of a layer on one processor; `starts` are the first layers of the processors."""
    one = Fraction(1)
    homes = [sum(start <= layer for start in starts) - 1 for layer in range(layers)]
    tasks: list[Task] = []
    for layer, home in enumerate(homes):
        tasks += [Task("D", layer, home, one)] if layer else []
        tasks += [Task("F", layer, home, one), Task("G", layer, home, one)]
    return tasks


def _undivided(plan: LayerPipePlan, linear: Sequence[bool]) -> LayerPipePlan:
    """Give the D of layers whose rows depend on each other to the processor that has most of it."""
    shares = by_task(plan.tasks)
    placed: list[Task] = []
    for task in plan.tasks:
        if task.kind != "D" or linear[task.layer]:
            placed.append(task)
        elif task == max(shares["D", task.layer], key=lambda share: share.fraction):
            placed.append(task._replace(fraction=Fraction(1)))
    return assemble(plan.layers, plan.processors, plan.mode, placed)


def charged_loads(plan: LayerPipePlan, linear: Sequence[bool]) -> list[Fraction]:
    """Loads, with the forwards that layers other than linear maps run again away from home."""
    loads = [exact(load) for load in plan.loads]
    for layer, processor in Dataflow(plan.tasks, len(plan.layers), layer_kinds(plan.tasks, linear)).repeated_forwards():
        loads[processor] += exact(plan.layers[layer].F)
    return loads


def executable(
    plan: LayerPipePlan,
    names: Sequence[str],
    spans: Sequence[Span],
    parameters: Sequence[int],
    *,
    loads: Sequence[Fraction] | None = None,
    g: int = 0,
    measured: bool = False,
    note: str = "",
) -> TaskPlan:
    """A placement as a plan for a model.

    **Arguments:**

    - `names`, `spans`: of the blocks, and which of them form each layer.
    - `parameters`: of each layer.
    - `loads`: of the processors, if not the plan's own.
    - `g`: slots by which weight gradients come later.
    """
    if len(spans) != len(plan.layers):
        raise PlanError(f"the plan is for {len(plan.layers)} layers, the model has {len(spans)}")
    tasks, groups = merge_whole_layers(shift_weight_gradients(plan.tasks, g), len(plan.layers))
    return TaskPlan(
        blocks=tuple(names),
        starts=tuple(spans[first][0] for first, _ in groups),
        stage_costs=tuple(float(load) for load in (plan.loads if loads is None else loads)),
        parameters=tuple(sum(parameters[first:end]) for first, end in groups),
        measured=measured,
        note=note,
        tasks=tuple(tasks),
        processors=plan.processors,
        mode=plan.mode,
    ).check()


def place_layers(
    names: Sequence[str], starts: Sequence[int], parameters: Sequence[int], costs: Sequence[float], g: int = 0
) -> TaskPlan:
    """Whole layers, one per processor, where the user said where they begin."""
    tasks = shift_weight_gradients(retime(whole_layers(range(len(starts)), len(starts)), len(starts)), g)
    return TaskPlan(
        blocks=tuple(names),
        starts=tuple(starts),
        stage_costs=tuple(costs),
        parameters=tuple(parameters),
        tasks=tuple(tasks),
        processors=len(starts),
        mode="whole",
    ).check()
