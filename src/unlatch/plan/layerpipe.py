"""LayerPipe: the three tasks of every layer as separate work for any number of devices.

A reconstruction: the abstract of LayerPipe (Unnikrishnan and Parhi 2021) names the two ideas (the gradients of weights
and of activations are independent tasks; the latter is divided between two consecutive layers), not the algorithm. Here
the tasks stand in one row, devices take consecutive runs of it, and the best cut is found exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ..errors import PlanError
from ..schedule.channel import FREE, Channel
from .chain_partition import split_row
from .dataflow import Dataflow, Sizes, cut_bytes, direct_bytes, layer_kinds
from .layer_costs import LayerCost, Number, as_chain, exact, plain
from .linked_partition import linked_interval, split_linked
from .plan import Plan
from .plan_file import plan_to_json
from .retiming import Delays, delays, retime
from .tasks import Mode, Task, by_task, chain_items, check_mode

__all__ = ["PlannedTasks", "assemble", "iteration_bound", "pipedream_interval", "plan_layerpipe"]

ANYWHERE = "tasks lie anywhere, and training follows only plans in a row: plan with --placement row"
SHARED = "the input gradient of a layer that is no linear map cannot be shared: plan with --mode atomic"


@dataclass(frozen=True)
class PlannedTasks:
    """A plan of tasks for layers with given costs, and what follows from it.

    Numbers are exact fractions if all costs are whole numbers or fractions, else floats.
    """

    #: The layers, as `as_chain` gives them.
    layers: tuple[LayerCost, ...]
    mode: Mode
    plan: Plan
    #: Time per mini-batch in steady state.
    initiation_interval: Number
    delays: Delays
    #: Bytes per mini-batch over each border of the row of devices; empty if tasks are not placed in a row.
    cut_bytes: tuple[Number, ...]
    communication_bytes: Number
    channel: Channel = FREE
    #: Whether no other placement in this mode has a smaller interval; for plans in a row: no other row.
    proven: bool = True
    #: Which layers are linear maps.
    linear: tuple[bool, ...] = ()

    @property
    def dataflow(self) -> Dataflow:
        """Who needs which tensor of whom."""
        return Dataflow(self.tasks, len(self.layers), layer_kinds(self.tasks, self.linear))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Those of the plan."""
        return self.plan.tasks

    @property
    def loads(self) -> tuple[Number, ...]:
        """Time that each device computes per mini-batch."""
        return self.plan.loads

    @property
    def devices(self) -> int:
        """How many there are, with work or without."""
        return self.plan.devices

    @property
    def contiguous(self) -> bool:
        """Whether every device has a consecutive run of the row of tasks."""
        return bool(self.cut_bytes) or self.devices == 1

    @property
    def work(self) -> Number:
        """Time of all tasks of one mini-batch on one device."""
        return sum(self.loads, start=0)

    @property
    def utilisation(self) -> Number:
        """Share of the time that the devices compute, on average."""
        return self.work / (self.devices * self.initiation_interval)

    @property
    def depth(self) -> int:
        """Slots from the first forward to the last gradient of one mini-batch."""
        return max(task.slot for task in self.tasks)

    def makespan(self, batches: int) -> Number:
        """Time of a run in which all devices change slots together.

        >>> plan_layerpipe([LayerCost("", 1, 1, 1)] * 4, 4).makespan(34)
        Fraction(110, 1)
        """
        return self.initiation_interval * (batches + self.depth)

    @property
    def stash_bytes(self) -> Number:
        """Bytes kept of old weights for D and of layer inputs for G, without the input of the first layer."""
        weights = [layer.weight_bytes for layer in self.layers]
        inputs = [0, *(layer.activation_bytes for layer in self.layers[:-1])]
        kept = zip(self.delays.weight_stash, weights, self.delays.activation, inputs, strict=True)
        return sum((old * weight + slots * size for old, weight, slots, size in kept), start=0)

    def to_json(self) -> dict[str, Any]:
        """The plan, and figures about it."""
        return plan_to_json(self.plan) | {
            "devices": self.devices,
            "busy_devices": self.plan.busy_devices,
            "initiation_interval": plain(self.initiation_interval),
            "delays": list(self.delays.gradient),
            "utilisation": plain(self.utilisation),
            "communication_bytes": plain(self.communication_bytes),
            "cut_bytes": [plain(size) for size in self.cut_bytes],
            "weight_stash": list(self.delays.weight_stash),
            "activation_buffers": list(self.delays.activation),
            "stash_bytes": plain(self.stash_bytes),
            "iteration_bound": plain(iteration_bound(self.layers, self.delays.gradient, self.tasks)),
            "contiguous": self.contiguous,
            "proven": self.proven,
        }


def plan_layerpipe(
    costs: Sequence[LayerCost],
    devices: int,
    mode: str = "divisible",
    *,
    channel: Channel = FREE,
    most_parts: int | None = None,
    linear: Sequence[bool] | None = None,
) -> PlannedTasks:
    """The best consecutive placement of all tasks.

    **Arguments:**

    - `costs`: of the layers, in order; the D of the first is ignored.
    - `devices`: how many; those that are of no use stay empty.
    - `mode`: see `chain_items`.
    - `channel`: links between neighbours. If messages take time, the cut also depends on what crosses it.
    - `most_parts`: 2 keeps every D on at most two devices even where it is longer than the interval.
    - `linear`: which layers are linear maps; of others no D is shared. All by default.

    >>> plan = plan_layerpipe([LayerCost(name, 1, 1, 1) for name in "abcd"], 2)
    >>> plan.initiation_interval, plan.delays.gradient
    (Fraction(11, 2), (2, 2, 0, 0))
    """
    if devices < 1:
        raise PlanError(f"expected at least 1 device, got {devices}")
    chain = as_chain(costs)
    how = check_mode(mode)
    items = chain_items(chain, how)
    if linear is not None:
        items = [item if linear[item.tasks[0][1]] else item._replace(divisible=False) for item in items]
    _, parts = split_row([i.size for i in items], [i.divisible for i in items], devices, most_parts)
    placed = [Task(kind, layer, p.device, p.fraction) for p in parts for kind, layer in items[p.item].tasks]
    plan = assemble(chain, devices, how, placed, channel=channel, linear=linear)
    if channel == FREE:
        return plan
    homes = split_linked(chain, items, devices, channel, known=float(plan.initiation_interval))
    if homes is not None:
        placed = [Task(*task, at, Fraction(1)) for item, at in zip(items, homes, strict=True) for task in item.tasks]
        plan = assemble(chain, devices, how, placed, channel=channel, linear=linear)
    return replace(plan, proven=how != "divisible")


def assemble(
    chain: Sequence[LayerCost],
    devices: int,
    mode: Mode,
    placed: Sequence[Task],
    *,
    channel: Channel = FREE,
    in_a_row: bool = True,
    proven: bool = True,
    linear: Sequence[bool] | None = None,
) -> PlannedTasks:
    """All that follows from where the tasks are placed.

    **Arguments:** `linear`: which layers are linear maps, all by default; others run forward again where they must.
    """
    number = exact if channel == FREE and all(map(_is_exact, chain)) else float
    tasks = retime(placed, len(chain))
    maps = tuple(linear or [True] * len(chain))
    flow, sizes = Dataflow(tasks, len(chain), layer_kinds(tasks, maps)), Sizes.of(chain)
    loads = [Fraction(0)] * devices
    for step in flow.steps:
        loads[step.place.device] += flow.time(step, chain)
    cuts = cut_bytes(flow, sizes, devices) if in_a_row else []
    total = sum(cuts, Fraction(0)) if in_a_row else direct_bytes(flow, sizes)
    interval = max(loads) if channel == FREE else exact(linked_interval(loads, cuts, channel))
    plan = Plan(
        blocks=tuple(layer.name for layer in chain),
        starts=tuple(range(len(chain))),
        loads=tuple(number(load) for load in loads),
        tasks=tuple(tasks),
        method="layerpipe",
        options={"mode": mode},
        analysis=_unfit(tasks, maps, in_a_row or devices == 1),
    )
    return PlannedTasks(
        layers=tuple(chain),
        mode=mode,
        plan=plan,
        initiation_interval=number(interval),
        delays=delays(tasks, len(chain)),
        cut_bytes=tuple(number(size) for size in cuts),
        communication_bytes=number(total),
        channel=channel,
        proven=proven,
        linear=maps,
    )


def _unfit(tasks: Sequence[Task], linear: Sequence[bool], in_a_row: bool) -> str:
    """Why training cannot follow these tasks; empty if it can."""
    if not in_a_row:
        return ANYWHERE
    shared = any(task.kind == "D" and task.fraction != 1 and not linear[task.layer] for task in tasks)
    return SHARED if shared else ""


def pipedream_interval(costs: Sequence[LayerCost], devices: int) -> Fraction:
    """Interval of the best straight pipeline of whole layers: the baseline.

    >>> pipedream_interval([LayerCost("", 1, 1, 1)] * 4, 3)
    Fraction(5, 1)
    """
    sizes = [exact(layer.F) + exact(layer.D) + exact(layer.G) for layer in as_chain(costs)]
    return split_row(sizes, [False] * len(sizes), devices)[0]


def iteration_bound(chain: Sequence[LayerCost], gradient_delays: Sequence[int], tasks: Sequence[Task] = ()) -> Fraction:
    """The interval that no machine can beat at these delays: the time round a layer's weight loop over its delays.

    **Arguments:** `tasks`: where a D is shared, its shares run side by side, so the largest counts; whole by default.

    >>> iteration_bound(as_chain([LayerCost("", 1, 1, 1)] * 4), (0, 0, 0, 0))
    Fraction(8, 1)
    """
    shares = {key: max(share.fraction for share in parts) for key, parts in by_task(tasks).items()}
    best = Fraction(0)
    after = Fraction(0)
    for number, delay in reversed(list(enumerate(gradient_delays))):
        layer = chain[number]
        loop = after + exact(layer.F) + exact(layer.G)
        best = max(best, loop / (1 + delay))
        after += exact(layer.F) + exact(layer.D) * shares.get(("D", number), 1)
    return best


def _is_exact(layer: LayerCost) -> bool:
    values = (layer.F, layer.D, layer.G, layer.hadamard, layer.activation_bytes, layer.weight_bytes)
    return all(isinstance(value, int | Fraction) for value in values)
