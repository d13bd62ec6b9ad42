"""LayerPipe: the two gradients of a layer as separate work, placed on devices so that all are equally busy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ...errors import ConfigError, PlanError
from ...nn.chain import Block, StageChain
from ...nn.tree import Tree
from ...plan import Plan
from ...plan.dataflow import Dataflow, layer_kinds
from ...plan.layer_costs import LayerCost, layer_costs_from_json
from ...plan.layer_groups import linear_of
from ...plan.layerpipe import PlannedTasks, assemble, plan_layerpipe
from ...rules.activations import Graph
from ...rules.bundle import Rules
from ...rules.updates import StagePlace
from ...rules.weights import backward_weights
from ...runtime.blueprint import Blueprint
from ...runtime.station import Station
from ...schedule import Schedule, split_rounds, ticked
from ...schedule.channel import FREE, Channel
from ...schedule.simulation import Costed
from ..base import Delayed, Method, register
from ..options import at_least
from .entries import TaskLayout
from .layers import GraphAway, GraphHome, Home, LinearAway, LinearHome, WholeHome
from .planner import LayerPipePlanner
from .planning import fit_tasks, plan_layers
from .station import TaskStation
from .task_planning import place_tasks
from .workload import costed

__all__ = ["LayerPipe"]


def _layer_costs(given: Any) -> str | tuple[LayerCost, ...] | None:
    """Costs as they are used; from settings come tables, as in a costs file."""
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, Sequence):
        raise ConfigError(f"layerpipe: costs is a file or a list of layers with name, F, D and G, got {given!r}")
    if given and all(isinstance(layer, LayerCost) for layer in given):
        return tuple(given)
    try:
        return tuple(layer_costs_from_json(list(given)))
    except PlanError as error:
        raise ConfigError(f"layerpipe: {error}") from None


@register
@dataclass(frozen=True)
class LayerPipe(Delayed):
    """Gradient pipelining (Unnikrishnan and Parhi 2021, 2025), reconstructed from the published abstracts.

    **Arguments:**

    - `mode`: what is placed. `"stages"` is LayerPipe2: whole layers in stages, one hop per tick, delay 2S with S stages
      above. The others place forward (F), input gradient (D) and weight gradient (G) of every layer by themselves;
      then `stages` of `parallelize` counts devices. `"divisible"`: a D may be shared by neighbours, split over the
      rows of the batch. `"atomic"`: it may not. `"factor"`: its elementwise factor goes to the layer below.
    - `weights`: of the backward: a `"stash"` of the forward's, the `"latest"`, or a moving-`"average"` reconstruction
      of the forward's.
    - `extra_delay`: slots by which every weight gradient comes later than its delay demands.
    - `split_backward`: compute input and weight gradients one after the other in mode `"stages"` (implied by an
      `extra_delay`).
    - `costs`: of the layers, instead of a measurement: a costs file (as for `unlatch plan --costs`) or its layers.
    - `delays`: per stage, set from the plan by `parallelize`.

    >>> LayerPipe(mode="stages", extra_delay=1).lateness(3)
    (5, 3, 1)
    """

    mode: Literal["divisible", "atomic", "factor", "stages"] = "divisible"
    weights: Literal["stash", "latest", "average"] = "stash"
    extra_delay: Annotated[int, at_least(0)] = 0
    split_backward: bool = False
    costs: str | tuple[LayerCost, ...] | None = None
    delays: tuple[int, ...] = ()

    name = "layerpipe"
    summary = "F, D and G of each layer placed by themselves, delay 2(K-k) or as planned"
    planner = LayerPipePlanner()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places_tasks and self.shrink != 1.0:
            raise ConfigError(f'layerpipe: shrink acts between stages, so it needs mode="stages": got {self.shrink}')
        object.__setattr__(self, "delays", tuple(self.delays))
        object.__setattr__(self, "costs", _layer_costs(self.costs))
        self.rules()

    @property
    def places_tasks(self) -> bool:
        """Whether tasks are placed, not stages."""
        return self.mode != "stages"

    @property
    def unreplicable(self) -> str | None:
        if self.places_tasks:
            return (
                "where tasks are placed apart, the loss leaves the last layer with its gradient, before replicas can "
                'sum it: use mode="stages"'
            )
        return super().unreplicable

    def schedule(self, stages: int) -> Schedule:
        """The order of stages; where tasks are placed, that of the stages with the same number of hops."""
        return split_rounds(stages, self.extra_delay) if self.extra_delay or self.split_backward else ticked(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), backward_weights(self.weights))

    def lateness(self, stages: int) -> tuple[int, ...]:
        return self.delays or super().lateness(stages)

    @property
    def call(self) -> str:
        # Delays are those of a plan, not the caller's.
        return super(LayerPipe, replace(self, delays=())).call

    def crossed(self, stages: int) -> list[int]:
        # The moving average stands in for the weights of the input gradient, which has no extra delay.
        return [math.ceil((late - self.extra_delay) / self.per_update) for late in self.lateness(stages)]

    def plan(
        self,
        blocks: Sequence[Block],
        stages: int,
        split: Literal["auto"] | Sequence[str] = "auto",
        sample: tuple[Tree, Tree] | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    ) -> Plan:
        if self.places_tasks:
            return plan_layers(blocks, self, stages, split, sample, precision)
        return super().plan(blocks, stages, split, sample, precision)

    def fit_plan(
        self, plan: Plan, blocks: Sequence[Block], precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    ) -> Plan:
        return fit_tasks(plan, blocks, self, precision) if plan.tasks else super().fit_plan(plan, blocks, precision)

    def check_plan(self, plan: Plan, stages: int) -> None:
        if not self.places_tasks:
            super().check_plan(plan, stages)
        elif not plan.check().tasks:
            raise PlanError(
                f'layerpipe in mode "{self.mode}" needs a plan of tasks: leave plan out, or pass a plan with tasks'
            )
        elif plan.devices != stages:
            raise PlanError(f"the plan uses {plan.devices} devices, but stages={stages} was asked for")

    def most_stages(self, layers: int) -> int:
        # Three tasks of every layer, but no input gradient of the first one.
        return 3 * layers - 1 if self.places_tasks else layers

    def placed(
        self, layers: Sequence[LayerCost], devices: int, channel: Channel, linear: Sequence[bool] | None
    ) -> tuple[PlannedTasks, Costed] | None:
        if not self.places_tasks:
            return None
        if linear is None or channel != FREE:
            plan = plan_layerpipe(layers, devices, self.mode, channel=channel, linear=linear)
        else:
            # As for training, where it is known what layers allow.
            found, *_ = place_tasks(layers, devices, self.mode, linear)
            plan = assemble(found.layers, devices, found.mode, found.tasks, linear=linear)
        return plan, costed(plan)

    def follow(self, plan: Plan) -> Method:
        return replace(self, delays=plan.delays)

    def program(self, blueprint: Blueprint) -> Schedule:
        return super().program(blueprint) if not self.places_tasks else _Building(self, blueprint).layout.schedule

    def placement(self, blueprint: Blueprint) -> Sequence[int]:
        return super().placement(blueprint) if not self.places_tasks else _Building(self, blueprint).layout.devices

    def stations(self, blueprint: Blueprint) -> Mapping[int, Station]:
        return super().stations(blueprint) if not self.places_tasks else _Building(self, blueprint).stations()


class _Building:
    """Makes stations from a plan of tasks."""

    def __init__(self, method: LayerPipe, blueprint: Blueprint) -> None:
        self.method, self.blueprint, self.plan = method, blueprint, blueprint.plan
        precision = blueprint.options.precision
        self.maps = [linear_of(blueprint.blocks, span, precision) for span in self.plan.spans]
        kinds = layer_kinds(self.plan.tasks, [found is not None for found in self.maps])
        for task in self.plan.tasks:
            if task.kind == "D" and task.fraction != 1 and self.maps[task.layer] is None:
                why = "only a linear map with an elementwise function allows"
                if precision != "fp32":
                    why = f"precision={precision!r} does not allow, since there autograd has to keep track of dtypes"
                raise PlanError(
                    f"the input gradient of layer {task.layer} ({self.plan.blocks[self.plan.starts[task.layer]]}) is "
                    f"shared by rows, which {why}: use mode='atomic'"
                )
        factors = [found is not None and found.function is not None for found in self.maps]
        self.flow = Dataflow(self.plan.tasks, len(self.maps), kinds, factors)
        self.layout = TaskLayout(self.flow, self.plan.devices)

    def stations(self) -> dict[int, Station]:
        """Those of this rank."""
        found: dict[int, Station] = {}
        for index, (layer, device) in enumerate(self.layout.stations):
            if self.blueprint.is_here(device):
                home = self._home(layer) if index == layer else None
                away = self._away(layer) if home is None else None
                found[index] = TaskStation(index, self.layout, home, away, self.maps)
        return found

    def _away(self, layer: int) -> LinearAway | GraphAway:
        found = self.maps[layer]
        if found is not None:
            return LinearAway(found)
        return GraphAway(layer, self._module(layer), self.blueprint.options)

    def _module(self, layer: int) -> StageChain:
        start, end = self.plan.spans[layer]
        return self.blueprint.module(self.blueprint.blocks[start:end])

    def _reach(self, layer: int) -> int:
        """Slots between the forward and the use of its weights in a gradient."""
        tasks = self.flow.layers[layer]
        used = [share.slot for share in tasks.input_gradient if share.device == tasks.home]
        used += [receiver.slot - 1 for receiver in self.flow.weight_receivers(layer)]
        if not used and tasks.kind != "linear":
            used = [tasks.weight_gradient.slot]
        return max(used, default=tasks.forward.slot) - tasks.forward.slot

    def _home(self, layer: int) -> Home:
        blueprint, rules, tasks = self.blueprint, self.method.rules(), self.flow.layers[layer]
        parts = blueprint.microbatches * self.method.accumulate
        settings: dict[str, Any] = {
            "layer": layer,
            "last": layer == self.flow.last,
            "tasks": tasks,
            "weight_receivers": len(self.flow.weight_receivers(layer)),
            "delay": math.ceil(self._reach(layer) / parts),
            "factor": rules.update.scale(StagePlace(tasks.home, self.plan.devices)),
        }
        place = (layer, len(self.maps), self._module(layer), rules, blueprint.options)
        if tasks.kind == "linear":
            found = self.maps[layer]
            assert found is not None
            return LinearHome(*place, linear=found, **settings)
        return WholeHome(*place, **settings) if tasks.kind == "whole" else GraphHome(*place, **settings)
