"""How much memory each device needs: weights and their versions, gradients, optimizer state, activations in flight.

Counted for tensors that last; what a layer needs while it runs, and what the framework itself takes, is not included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..plan.layer_costs import LayerCost
from .method_run import MethodRun

__all__ = ["device_bytes"]


def device_bytes(run: MethodRun, *, optimizer_slots: int = 1, input_bytes: float = 0) -> list[float]:
    """Bytes on each device in use.

    **Arguments:**

    - `run`: from `simulate_method`.
    - `optimizer_slots`: numbers that the optimizer keeps per weight: 0 for plain SGD, 1 with momentum, 2 for Adam.
    - `input_bytes`: of one batch of data, which the first layer keeps.

    >>> from .method_run import simulate_method
    >>> layers = [LayerCost(name, 1, 1, 1, activation_bytes=10, weight_bytes=100) for name in "ab"]
    >>> device_bytes(simulate_method("1f1b", layers, 2))
    [300.0, 302.5]
    """
    kept = _kept(run.layers, input_bytes)
    if run.plan is not None:
        return _placed(run, kept, optimizer_slots)
    ends = (*run.starts[1:], len(run.layers))
    return [
        _stage(run, stage, run.layers[start:end], kept[start:end], optimizer_slots, input_bytes)
        for stage, (start, end) in enumerate(zip(run.starts, ends, strict=True))
    ]


def _kept(layers: Sequence[LayerCost], input_bytes: float) -> list[float]:
    """What a whole batch keeps from the forward to the backward of each layer."""
    inputs = [input_bytes, *(float(layer.activation_bytes) for layer in layers[:-1])]
    return [
        size if layer.kept_bytes is None else float(layer.kept_bytes)
        for layer, size in zip(layers, inputs, strict=True)
    ]


def _versions(run: MethodRun, gap: int) -> int:
    """Copies of the weights besides the current one."""
    late = math.ceil(gap / (run.microbatches * run.method.accumulate))
    return run.method.rules().weight_copies(late)


def _stage(
    run: MethodRun,
    stage: int,
    layers: Sequence[LayerCost],
    kept: Sequence[float],
    optimizer_slots: int,
    input_bytes: float,
) -> float:
    weights = sum(float(layer.weight_bytes) for layer in layers)
    below = run.starts[stage] - 1
    entry = (float(run.layers[below].activation_bytes) if stage else input_bytes) / run.microbatches
    graph = sum(kept) / run.microbatches
    rule = run.method.rules().activation.at(stage, run.stages)
    activations = rule.resident(run.simulation.in_flight[stage], entry, graph)
    return weights * (2 + optimizer_slots + _versions(run, run.gaps[stage])) + activations


def _placed(run: MethodRun, kept: Sequence[float], optimizer_slots: int) -> list[float]:
    """Weights and their versions where the forward runs, activations where the weight gradient is computed."""
    assert run.plan is not None
    homes = {(task.kind, task.layer): task.processor for task in run.plan.tasks}
    found = [0.0] * run.devices
    for layer, (cost, size) in enumerate(zip(run.layers, kept, strict=True)):
        versions = _versions(run, run.plan.delays.weight_stash[layer])
        found[homes["F", layer]] += float(cost.weight_bytes) * (2 + optimizer_slots + versions)
        found[homes["G", layer]] += (run.plan.delays.activation[layer] + 1) * size / run.microbatches
    return found
