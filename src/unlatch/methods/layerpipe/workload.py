"""What the tasks of a plan cost in virtual time: the schedule that is trained, with times and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import cast

from ...plan.dataflow import Sizes
from ...plan.layer_costs import LayerCost
from ...plan.layerpipe import PlannedTasks
from ...schedule import Kind, Workload
from ...schedule.entries import Route
from ...schedule.machine import Machine
from ...schedule.simulation import Costed, Simulation
from .entries import TaskLayout

__all__ = ["costed", "simulate_layerpipe", "task_workload"]


def simulate_layerpipe(
    plan: PlannedTasks, batches: int, machine: Machine | None = None, *, exact: bool = True
) -> Simulation:
    """Run a plan, self-timed: each device keeps the order of the slots but does not wait for their end.

    **Arguments:**

    - `batches`: mini-batches.
    - `machine`: speeds, links, jitter; by default the links of the plan.
    - `exact`: count in fractions if the plan does; otherwise in floats, which is faster.

    >>> from ...plan.layerpipe import plan_layerpipe
    >>> run = simulate_layerpipe(plan_layerpipe([LayerCost("", 1, 1, 1)] * 4, 4), 34)
    >>> float(run.makespan), float(run.interval)
    (97.75, 2.75)
    """
    return costed(plan, exact=exact).simulate(batches, machine=machine or Machine(plan.channel))


def costed(plan: PlannedTasks, *, exact: bool = False) -> Costed:
    """The schedule that training follows under a plan, with times and bytes for one mini-batch."""
    layout = TaskLayout(plan.dataflow, plan.devices)
    workload = task_workload(layout, plan.layers, exact=exact and isinstance(plan.initiation_interval, Fraction))
    owners = [layer for layer, _ in layout.stations]
    return Costed(layout.schedule, workload, layout.devices, plan.devices, owners)


def task_workload(
    layout: TaskLayout, layers: Sequence[LayerCost], *, sizes: Sizes | None = None, exact: bool = False
) -> Workload:
    """Times of all jobs and bytes of all messages; shipping and receiving take no time of their own.

    **Arguments:**

    - `sizes`: of tensors, if more is known than the costs of layers tell.
    - `exact`: keep fractions.
    """
    number = (lambda value: cast(float, value)) if exact else float
    times: list[dict[Kind, float]] = [{} for _ in layout.stations]
    for job in layout.jobs:
        times[job.entry.station][job.entry.kind] = number(layout.flow.time(job.step, layers))
    sent = {message[:3]: float(message.bytes) for message in layout.flow.messages(sizes or Sizes.of(layers))}
    routes: dict[Route | str, float] = {}
    for job in layout.jobs:
        for name, sender, receiver in job.entry.outgoing:
            ends = name, layout.devices[sender], layout.devices[receiver]
            routes[name, sender, receiver] = sent.get(ends, 0.0)
    inputs = [0, *(layer.activation_bytes for layer in layers[:-1])]
    kept = [
        float(size if layer.kept_bytes is None else layer.kept_bytes)
        for layer, size in zip(layers, inputs, strict=True)
    ]
    return Workload(times, routes, kept)
