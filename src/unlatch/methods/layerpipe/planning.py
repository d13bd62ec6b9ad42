"""Where LayerPipe's tasks go for a given model: costs of its layers, placement, and who lives on which rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...nn.chain import Block, stage_starts
from ...nn.linear_map import LinearMap
from ...nn.tree import Tree
from ...plan import make_plan, profile
from ...plan.layer_costs import LayerCost, read_layer_costs
from ...plan.layer_groups import Span, group_blocks, group_costs, grouped_profile, linear_of, parameter_costs
from ...plan.task_plan import TaskPlan
from ...plan.task_planning import executable, place_layers, place_tasks

if TYPE_CHECKING:
    from .layerpipe import LayerPipe

__all__ = ["plan_layers"]

Precision = Literal["fp32", "bf16"]


def plan_layers(
    blocks: Sequence[Block],
    method: LayerPipe,
    processors: int,
    split: Literal["auto"] | Sequence[str] = "auto",
    sample: tuple[Tree, Tree] | None = None,
    precision: Precision = "fp32",
) -> TaskPlan:
    """Where the tasks of a model go; with `split`, whole layers that begin at these blocks.

    >>> from torch import nn
    >>> from unlatch.methods import LayerPipe
    >>> from unlatch.nn.chain import chain
    >>> blocks = chain([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    >>> plan_layers(blocks, LayerPipe(), 2).homes
    (0, 1, 1)
    """
    names = [block.name for block in blocks]
    if split != "auto":
        given = make_plan(blocks, processors, split=split)
        starts = stage_starts(blocks, split)
        return place_layers(names, starts, given.parameters, given.stage_costs, method.g)
    spans = group_blocks(blocks)
    maps = [linear_of(blocks, span, precision) for span in spans]
    costs = _costs(blocks, spans, method, sample, precision)
    measured = method.costs is None and sample is not None
    if method.mode == "factor" and measured:
        costs = _with_factors(costs, maps)
    plan, loads, note = place_tasks(costs, processors, method.mode, [found is not None for found in maps])
    if method.costs is None and not measured:
        guess = "costs guessed from the number of parameters, not measured: pass a sample"
        note = f"{guess}; {note}" if note else guess
    counts = [sum(p.numel() for b in blocks[start:end] for p in b.module.parameters()) for start, end in spans]
    return executable(plan, names, spans, counts, loads=loads, g=method.g, measured=measured, note=note)


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
