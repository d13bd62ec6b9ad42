"""Where LayerPipe's tasks go for a given model: costs of its layers, placement, and who lives on which rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import PlanError
from ...nn.chain import Block
from ...nn.linear_map import LinearMap
from ...nn.tree import Tree
from ...plan import Plan, make_plan, profile
from ...plan.layer_costs import LayerCost, read_layer_costs
from ...plan.layer_groups import Span, group_blocks, group_costs, grouped_profile, linear_of, parameter_costs
from ...plan.plan import count_parameters
from ...plan.retiming import retime
from ...plan.tasks import Task, by_task
from .task_planning import executable, merge_whole_layers, place_layers, place_tasks, shift_weight_gradients

if TYPE_CHECKING:
    from .layerpipe import LayerPipe

__all__ = ["fit_tasks", "plan_layers"]

Precision = Literal["fp32", "bf16", "fp16"]


def plan_layers(
    blocks: Sequence[Block],
    method: LayerPipe,
    devices: int,
    split: Literal["auto"] | Sequence[str] = "auto",
    sample: tuple[Tree, Tree] | None = None,
    precision: Precision = "fp32",
) -> Plan:
    """Where the tasks of a model go; with `split`, whole layers that begin at these blocks.

    >>> from torch import nn
    >>> from unlatch.methods import LayerPipe
    >>> from unlatch.nn.chain import chain
    >>> blocks = chain([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    >>> plan_layers(blocks, LayerPipe(), 2).layer_devices
    (0, 1, 1)
    """
    if split != "auto":
        return place_layers(make_plan(blocks, devices, split=split), method.mode, method.extra_delay)
    spans = group_blocks(blocks)
    maps = [linear_of(blocks, span, precision) for span in spans]
    costs = _costs(blocks, spans, method, sample, precision)
    measured = method.costs is None and sample is not None
    if method.mode == "factor" and measured:
        costs = _with_factors(costs, maps)
    plan, loads, note = place_tasks(costs, devices, method.mode, [found is not None for found in maps])
    if method.costs is None and not measured:
        guess = "costs guessed from the number of parameters, not measured: pass a sample"
        note = f"{guess}; {note}" if note else guess
    counts = [count_parameters(blocks[start:end]) for start, end in spans]
    names = [block.name for block in blocks]
    return executable(
        plan,
        names,
        spans,
        counts,
        loads=loads,
        extra_delay=method.extra_delay,
        measured=measured,
        note=note,
    )


def fit_tasks(plan: Plan, blocks: Sequence[Block], method: LayerPipe, precision: Precision = "fp32") -> Plan:
    """A plan of tasks from a file for a model; devices with nothing to do are left out.

    Its layers must be those of the model: one per block, or one per block with weights together with what follows it.
    """
    spans = group_blocks(blocks)
    numbers = _numbers(plan, blocks, spans)
    linear = [linear_of(blocks, span, precision) for span in spans]
    tasks = []
    for kind, layer, device, fraction, _ in plan.tasks:
        if layer in numbers:
            number = numbers[layer]
            found = linear[number]
            # Other layers than linear maps multiply with their derivatives themselves.
            if kind != "H" or (found is not None and found.function is not None):
                tasks.append(Task(kind, number, device, fraction))
    whole = _whole_shares(tasks, [found is not None for found in linear])
    used = sorted({task.device for task in whole})
    if len(used) < plan.busy_devices:
        raise PlanError(
            f"the plan file {plan.source} gives some devices nothing but a share of an input gradient that cannot be "
            "shared in this model: plan it with `unlatch plan CONF.toml`, or with --mode atomic"
        )
    dense = [task._replace(device=used.index(task.device)) for task in whole]
    late = shift_weight_gradients(retime(dense, len(spans)), method.extra_delay)
    placed, groups = merge_whole_layers(late, len(spans))
    counts = [count_parameters(blocks[start:end]) for start, end in spans]
    return replace(
        plan,
        blocks=tuple(block.name for block in blocks),
        starts=tuple(spans[first][0] for first, _ in groups),
        loads=tuple(plan.loads[device] for device in used),
        parameters=tuple(sum(counts[first:end]) for first, end in groups),
        note=f"as {Path(plan.source).name} says",
        tasks=tuple(placed),
    ).check()


def _numbers(plan: Plan, blocks: Sequence[Block], spans: Sequence[Span]) -> dict[int, int]:
    """For each layer of the plan that stands for one of the model, its number there."""
    names = [block.name for block in blocks]
    firsts = [names[start] for start, _ in spans]
    planned = [layer[0] for layer in plan.stages]
    if planned == firsts:
        return {number: number for number in range(len(spans))}
    if planned == names:
        # Blocks without weights go where the layer goes that they belong to.
        return {start: number for number, (start, _) in enumerate(spans)}
    raise PlanError(
        f"the plan file {plan.source} is for another model: its layers are {', '.join(planned)}; those of this "
        f"model are {', '.join(firsts)}"
    )


def _whole_shares(tasks: Sequence[Task], linear: Sequence[bool]) -> list[Task]:
    """Shares that make exactly one; a D that cannot be shared by rows goes to the device with most of it."""
    found: list[Task] = []
    for (kind, layer), shares in by_task(tasks).items():
        if len(shares) > 1 and (kind != "D" or not linear[layer]):
            most = max(shares, key=lambda share: share.fraction)
            found.append(most._replace(fraction=Fraction(1)))
            continue
        total = sum((share.fraction for share in shares), Fraction(0))
        found += [share._replace(fraction=share.fraction / total) for share in shares]
    return found


def _costs(
    blocks: Sequence[Block],
    spans: Sequence[Span],
    method: LayerPipe,
    sample: tuple[Tree, Tree] | None,
    precision: Precision,
) -> list[LayerCost]:
    if method.costs is not None:
        given = read_layer_costs(method.costs) if isinstance(method.costs, str) else list(method.costs)
        return group_costs(given, blocks, spans)
    if sample is None:
        return parameter_costs(blocks, spans)
    return grouped_profile(profile(blocks, sample[0], precision=precision), spans)


def _with_factors(costs: Sequence[LayerCost], maps: Sequence[LinearMap | None]) -> list[LayerCost]:
    """Measure the elementwise factor of every D whose layer below is a linear map with a function."""
    result = [costs[0]]
    for below, found, cost in zip(costs, maps, costs[1:], strict=False):
        seconds = 0.0
        if found is not None and found.function is not None:
            # For the time of an elementwise product only the size matters.
            like = torch.ones(max(1, int(below.activation_bytes) // 4))
            seconds = min(_seconds(found.derivative, like, like) for _ in range(5))
        result.append(replace(cost, hadamard=min(seconds, float(cost.D))))
    return result


def _seconds(work: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    work(*args)
    return time.perf_counter() - start
