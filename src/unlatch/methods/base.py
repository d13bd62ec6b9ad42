"""A method is a schedule plus rules. Everything else about it follows from these two.

To add one: subclass `Method` (or `Delayed`), name it, return a schedule and rules, and `register` it. What the rest of
the library asks a method beyond these two (below the schedule and the rules) has defaults that suit most: generic code
calls these and never asks which method it has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import isabstract
from typing import Any, ClassVar, Literal, TypeVar

from ..errors import ConfigError, PlanError
from ..lookup import call, did_you_mean, import_function, unknown_options
from ..nn.chain import Block
from ..nn.parts import in_parts
from ..nn.tree import Tree
from ..plan import BlockCost, Plan, make_plan, profile
from ..plan.finer import finer_plan, whole_costs
from ..plan.layer_costs import LayerCost, as_chain
from ..plan.layerpipe import PlannedTasks
from ..plan.partition import contiguous_split
from ..rules.activations import Activation
from ..rules.bundle import Rules
from ..rules.gradients import FromAbove, Gradient, Shrunk
from ..rules.predict import NoPrediction, Predictor, predictor
from ..rules.updates import StagePlace, UpdateRule
from ..rules.weights import BackwardWeights, Current, ForwardWeights, Newest, Predicted
from ..runtime.blueprint import Blueprint
from ..runtime.stage import Stage
from ..runtime.station import ChainStation, Station
from ..schedule import Kind, Schedule, Workload
from ..schedule.channel import FREE, Channel
from ..schedule.simulation import Costed
from ..schedule.stability import auto_microbatches, version_lateness
from .costs import chain_workload, stage_costs
from .options import Whole, check_options
from .planner import Planner

__all__ = ["BASELINE", "ClosedForm", "Delayed", "GradientKind", "Method", "get", "names", "problems", "register"]

#: Of backpropagation; that of an older batch; that of a loss of the stage's own.
GradientKind = Literal["exact", "late", "local"]

#: The method that the speed and accuracy of all others are measured against.
BASELINE = "bp"

#: Predictors that the recursion has written out.
PREDICTIONS = ("none", "difference", "linear", "geometric", "constant-gradient")


@dataclass(frozen=True)
class ClosedForm:
    """A delayed method as a recursion over micro-batches: the arguments that `unlatch.reference.recursion` takes."""

    forward_version: Callable[[int, int], int]
    per_update: int
    backward: Literal["forward", "current", "average"]
    mixed: bool
    delays: Sequence[int]
    predict: str
    scale: Callable[[int, int], float]
    shrink: float


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods: a small frozen object, comparable and printable.

    **Arguments:**

    - `microbatches`: cut every batch into so many, with one update per batch. Total batch, gradient and
      learning rate stay what they were; delays counted in updates shrink. `"auto"` chooses by the method's rule.
    - `accumulate`: batches per update; their gradients are averaged.
    """

    microbatches: Whole | Literal["auto"] = "auto"
    accumulate: Whole = 1

    name: ClassVar[str] = ""
    #: One line for tables.
    summary: ClassVar[str] = ""
    #: What `measurements` returns, by the last part of its name, in words.
    measures: ClassVar[Mapping[str, str]] = {}
    #: Whether a cut that the library chooses may go through a block: then several tensors cross that border.
    divides_blocks: ClassVar[bool] = True
    #: Places work on devices in a way of its own, if the method has one; `plan auto` ranks the others too.
    planner: ClassVar[Planner | None] = None

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def schedule(self, stages: int) -> Schedule:
        """The order of work for `stages` stages."""

    @abstractmethod
    def rules(self) -> Rules:
        """What a stage keeps, which weights it sees, how it updates."""

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        """What `microbatches="auto"` means for this method."""
        return 1

    def resolve(self, stages: int, batch_size: int | None = None) -> Method:
        """The same method with every `"auto"` decided."""
        if self.microbatches != "auto":
            return self
        return replace(self, microbatches=self.choose_microbatches(stages, batch_size))

    def lateness(self, stages: int) -> tuple[int, ...]:
        """Per stage, micro-batches between the weights a forward sees and those its gradient is applied to."""
        schedule = self.schedule(stages)
        return tuple(schedule.lateness(stage) for stage in range(stages))

    def staleness(self, stages: int) -> tuple[float, ...]:
        """Per stage, the mean number of updates between forward and backward that theory gives."""
        return tuple(late / self.per_update for late in self.lateness(stages))

    # ------------------------------------------------------------- what it plans

    def plan(
        self,
        blocks: Sequence[Block],
        stages: int,
        split: Literal["auto"] | Sequence[str] = "auto",
        sample: tuple[Tree, Tree] | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    ) -> Plan:
        """Where a model is cut; `"auto"` measures the blocks on a sample, if there is one."""
        if split != "auto":
            return make_plan(in_parts(blocks, split), stages, recompute=self.recomputes, split=split)
        if sample is None or not 1 < stages < len(blocks):
            return make_plan(blocks, stages, recompute=self.recomputes)
        measured = profile(in_parts(blocks) if self.divides_blocks else blocks, sample[0], precision=precision)
        costs = whole_costs(blocks, measured) if self.divides_blocks else measured
        split = self.balanced_split(blocks, sample[0], stages, costs)
        plan = make_plan(blocks, stages, costs=costs, recompute=self.recomputes, split=split)
        return finer_plan(plan, blocks, measured, recompute=self.recomputes) if self.divides_blocks else plan

    def balanced_split(
        self, blocks: Sequence[Block], x: Tree, stages: int, costs: Sequence[BlockCost]
    ) -> Literal["auto"] | Sequence[str]:
        """A cut by names where stages cost more than their blocks; `"auto"` where they do not."""
        return "auto"

    def fit_plan(
        self, plan: Plan, blocks: Sequence[Block], precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    ) -> Plan:
        """A plan that was made without the model at hand, such as one from a file, for the model."""
        if plan.split is None:
            raise PlanError(f"{plan.source} places tasks, but {self.name} trains stages: plan for {self.name}")
        return make_plan(in_parts(blocks, plan.split), len(plan.starts), split=plan.split)

    def check_plan(self, plan: Plan, stages: int) -> None:
        """Raise `PlanError` unless a plan can be followed and is for as many stages as are asked for."""
        plan.check()
        if plan.split is None:
            raise PlanError(f"the plan places tasks, but {self.name} trains stages: leave plan out")
        if len(plan.starts) != stages:
            raise PlanError(f"the plan has {len(plan.starts)} stages, but stages={stages} was asked for")

    def tune(self, stages: Sequence[Sequence[Block]], sample: Any, loss_fn: Any) -> tuple[dict[str, Any], str]:
        """Options that are decided by measuring the stages, and a sentence that says why; none for most methods."""
        return {}, ""

    # --------------------------------------------------------- what it costs, in virtual time

    def workload(self, layers: Sequence[LayerCost], starts: Sequence[int], data_bytes: float = 0.0) -> Workload:
        """Times and bytes of `schedule(len(starts))`.

        **Arguments:**

        - `layers`: their costs for one micro-batch.
        - `starts`: first layer of each stage.
        - `data_bytes`: of the data of one micro-batch.
        """
        return chain_workload(stage_costs(layers, starts), self.rules().activation)

    def cuts(self, layers: Sequence[LayerCost], stages: int) -> list[list[int]]:
        """First layers of the stages in cuts that are worth a trial where messages take no time."""
        last = [float(layer.work) for layer in layers]
        again = [float(layer.F) if self.recomputes else 0.0 for layer in layers]
        return [contiguous_split([a + b for a, b in zip(last, again, strict=True)], stages, last=last)]

    def most_stages(self, layers: int) -> int:
        """Devices that so many layers can keep busy."""
        return layers

    def placed(
        self, layers: Sequence[LayerCost], devices: int, channel: Channel, linear: Sequence[bool] | None
    ) -> tuple[PlannedTasks, Costed] | None:
        """Where each task goes, and the schedule that follows, if it places tasks one by one instead of cutting."""
        return None

    def example(self, stages: int) -> Costed:
        """Its schedule for as many equal layers on as many devices."""
        layers = as_chain([LayerCost(str(layer), 1, 1, 1) for layer in range(stages)])
        found = self.placed(layers, stages, FREE, None)
        return found[1] if found else Costed(self.schedule(stages), self.workload(layers, range(stages)))

    # -------------------------------------------------------- what it adds to a run

    #: Whether `lr_scale` says anything.
    scales_lr: ClassVar[bool] = False

    def lr_scale(self, update: int) -> float:
        """Factor on the learning rate of the `update`-th update."""
        return 1.0

    def notes(self, measured: Sequence[Any]) -> list[str]:
        """What a user should know about a run that was just built. **Arguments:** `measured`: by its stations."""
        return []

    # ------------------------------------------------------------------ what runs

    def follow(self, plan: Plan) -> Method:
        """The same method with what it takes from a plan."""
        return self

    def program(self, blueprint: Blueprint) -> Schedule:
        """The schedule of a run."""
        return self.schedule(blueprint.stages)

    def placement(self, blueprint: Blueprint) -> Sequence[int]:
        """For each station of the schedule, its device in the plan."""
        return range(blueprint.stages)

    def stations(self, blueprint: Blueprint) -> Mapping[int, Station]:
        """The stations of this process, by number."""
        rules, count, modules = self.rules(), blueprint.stages, blueprint.modules()
        crossed = self.crossed(count)
        return {
            i: self.station(
                Stage(
                    i,
                    count,
                    modules[i],
                    rules,
                    blueprint.options,
                    delay=crossed[i],
                    hands_down_input=i > 0 and rules.activation.at(i - 1, count, modules[i - 1]).inverts,
                )
            )
            for i in range(count)
            if blueprint.is_here(i)
        }

    def station(self, stage: Stage) -> Station:
        """What drives one stage of a chain."""
        return ChainStation(stage.index, stage)

    def crossed(self, stages: int) -> list[int]:
        """Per stage, the most updates between the forward and the use of its weights in a gradient."""
        return [math.ceil(updates) for updates in self.staleness(stages)]

    @property
    def recomputes(self) -> bool:
        """Whether stages below the last run every forward twice."""
        return self.rules().activation.runs_forward_twice

    @property
    def per_batch(self) -> int:
        """Micro-batches per batch; 1 while it is undecided."""
        return self.microbatches if self.microbatches != "auto" else 1

    @property
    def per_update(self) -> int:
        """Micro-batches per update."""
        return self.per_batch * self.accumulate

    # ----------------------------------------------------- what it says about itself

    @property
    def settings(self) -> dict[str, Any]:
        """Options that differ from the defaults, as far as a settings file can say them.

        >>> get("pipedream", microbatches=2).settings
        {'microbatches': 2}
        """
        values = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}

    @property
    def address(self) -> str:
        """What `get` finds it by: its name if it is registered, else `package.module:Class`.

        >>> from .fdg import FDG
        >>> class Mine(FDG): pass
        >>> FDG().address, Mine().address
        ('fdg', 'unlatch.methods.base:Mine')
        """
        kind = type(self)
        return self.name if METHODS.get(self.name) is kind else f"{kind.__module__}:{kind.__qualname__}"

    @property
    def arguments(self) -> dict[str, Any]:
        """All options by name: `get(method.address, **method.arguments)` is the same method.

        >>> get("pipedream", microbatches=2).arguments["microbatches"]
        2
        """
        return {one.name: getattr(self, one.name) for one in fields(self) if one.init}

    @property
    def call(self) -> str:
        """The method as Python writes it, options that have their default left out.

        >>> get("pipedream", microbatches=2, predict="linear").call
        "unlatch.methods.PipeDream(microbatches=2, predict='linear')"
        """
        kind, default = type(self), {one.name: one.default for one in fields(self)}
        options = [f"{name}={value!r}" for name, value in self.arguments.items() if value != default[name]]
        package = "unlatch.methods." if kind.__module__.startswith("unlatch.methods.") else ""
        return f"{package}{kind.__name__}({', '.join(options)})"

    @property
    def gradient(self) -> GradientKind:
        """Whose gradient a stage applies."""
        return "exact" if self.schedule(1).flushes else "late"

    @property
    def inexact_at_rest(self) -> str | None:
        """Why gradients differ from backpropagation's even while weights stand still; `None` if they do not."""
        return None

    @property
    def inverts(self) -> bool:
        """Whether reversible stages compute their input back from their output."""
        return self.rules().activation.inverts

    @property
    def reconstruction_tolerance(self) -> float:
        """Relative error of a reconstructed input above which a warning names the stage."""
        return 0.5

    @property
    def keeps(self) -> str:
        """What stays of a batch between its forward and its backward, in words."""
        return self.rules().activation.kept

    def weight_copies(self, stages: int) -> int:
        """Old, predicted or averaged weights beside the current ones, at the first stage.

        >>> get("pipedream", microbatches=2).weight_copies(4)
        2
        """
        late = round(self.staleness(stages)[0] * self.per_update)
        return self.rules().weight_copies(max(version_lateness(late, self.per_update)))

    def closed_form(self, stages: int) -> ClosedForm | str:
        """The recursion that defines the method, or why there is none."""
        return f"{self.name} has no delay"

    # ------------------------------------------------------------ how it takes data

    @property
    def joined(self) -> int:
        """Batches of the loader that are processed as one."""
        return 1

    def joining(self, batches: int) -> Method:
        """The same method with `joined` set, where it joins batches at all."""
        return self

    @property
    def reads_on_every_rank(self) -> bool:
        """Whether every rank reads the data for itself, not the first one for all."""
        return False

    # ---------------------------------------------------------------------- replicas

    #: Kinds of entries, beside updates, before which gradients are summed over replicas of the network.
    also_applies: ClassVar[frozenset[Kind]] = frozenset()

    @property
    def repeats_backward(self) -> bool:
        """Whether a stage goes backward twice through one graph."""
        return False

    @property
    def unreplicable(self) -> str | None:
        """Why replicas cannot be trained by it; `None` if they can."""
        if self.reads_on_every_rank:
            return "every rank reads whole batches for itself, and rows are shared out by the first one"
        if not self.rules().gradient.adds_up:
            return (
                "its rule for gradients weighs that of a whole micro-batch, of which each replica has only a part: "
                "take a rule in which gradients of parts add up"
            )
        return None

    def check_replicas(self, replicas: int) -> None:
        """Raise `ConfigError` unless it can train so many replicas."""
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ConfigError(f"replicas must be a whole number, at least 1, got {replicas!r}")
        if replicas > 1 and self.unreplicable is not None:
            raise ConfigError(f"{self.name} cannot train {replicas} replicas: {self.unreplicable}")

    # -------------------------------------------------------------- what it measures

    def probing(self, every: int) -> Method | None:
        """The method with its own comparison with backpropagation switched on, every so many updates.

        **Returns:** `None` if it has none of its own and the gradients of its stages can be compared as they are.
        """
        return None

    def measurements(self, statistics: Sequence[Any], after: int = -1) -> list[dict[str, float]]:
        """What it measured over the updates, for a run's metrics: a row per update after `after`, oldest first.

        **Arguments:** `statistics`: of `Run.method_statistics`.

        **Returns:** rows with the update as `"measured/update"`, and numbers named `"<place><stage>/<measure>"`.
        """
        return []

    def summarise(self, statistics: Sequence[Any], data: float, step: float | None) -> dict[str, Any]:
        """What it adds to the summary of a run; sentences for the user under `"remarks"`.

        **Arguments:** `data`: seconds per batch to read it; `step`: measured seconds per batch, where known.
        """
        return {}


@dataclass(frozen=True)
class Delayed(Method):
    """Methods whose gradients arrive late: delay needs care, and these are the means.

    **Arguments:**

    - `predict`: run forwards at weights predicted for the time of their backward: `"none"`, `"difference"`, `"linear"`,
      `"geometric"`, `"constant-gradient"`, or a `Predictor`.
    - `gamma`: the step size of stage k of K is multiplied by `gamma ** (K - k)`.
    - `shrink`: every cotangent received from above is multiplied by this (FDG's gradient shrinking).
    """

    predict: str | Predictor = "none"
    gamma: float = 1.0
    shrink: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        predictor(self.predict)
        for name in ("gamma", "shrink"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{self.name}: {name} must lie in (0, 1], got {value!r}")

    @property
    def inexact_at_rest(self) -> str | None:
        scaled = "gradients are scaled on their way, so they differ from backpropagation's on purpose"
        return None if self.rules().gradient.border_factor == 1.0 else scaled

    def closed_form(self, stages: int) -> ClosedForm | str:
        schedule, rules = self.schedule(stages), self.rules()
        factor, per_update = rules.gradient.border_factor, self.per_update
        if schedule.flushes:
            return f"{self.name} has no delay"
        if not rules.update.averages:
            return "gradients of several batches are added up here, and the recursion averages them"
        if rules.activation.inverts:
            return "reversible stages reconstruct their inputs, which is approximate by design"
        if factor is None:
            return "the recursion knows gradients that are multiplied by a constant at every border, no others"
        chosen = rules.forward.prediction
        if chosen is not None and (chosen.name not in PREDICTIONS or chosen != predictor(chosen.name)):
            return f"the recursion has no predictor {chosen!r}"
        lateness, delays = self.lateness(stages), self.crossed(stages)
        places = [StagePlace(stage, stages, delay) for stage, delay in enumerate(delays)]
        return ClosedForm(
            forward_version=lambda stage, micro: rules.forward.version(
                max(0, micro - lateness[stage]) // per_update, micro // per_update
            ),
            per_update=per_update,
            backward=rules.backward.taken_at,
            mixed=rules.mixes,
            delays=delays,
            predict="none" if chosen is None else chosen.name,
            scale=lambda stage, update: (
                rules.update.scale(places[stage]) * rules.update.scale_at(places[stage], update)
            ),
            shrink=factor,
        )

    def _rules(
        self,
        activation: Activation,
        backward: BackwardWeights | None = None,
        **others: ForwardWeights | Gradient | UpdateRule,
    ) -> Rules:
        """These rules; where `others` leaves them open, `forward`, `gradient` and `update` follow from the options."""
        chosen = predictor(self.predict)
        usual: dict[str, Any] = {
            "forward": Newest() if isinstance(chosen, NoPrediction) else Predicted(chosen),
            "gradient": FromAbove() if self.shrink == 1.0 else Shrunk(self.shrink),
            "update": UpdateRule(decay=self.gamma),
        }
        return Rules(activation, backward=backward or Current(), **{**usual, **others})

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        return auto_microbatches(max(self.lateness(stages)), batch_size)


METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Make a method addressable by its name; usable as a class decorator."""
    METHODS[method.name] = method
    return method


def names() -> list[str]:
    """The registered names, in the order of registration."""
    return list(METHODS)


def get(method: str | Method, **options: Any) -> Method:
    """The method called so, with these options; a method object is returned as it is.

    **Arguments:** `method`: a registered name, or `package.module:Class` for one that is not registered.

    >>> get("fdg", microbatches=4).microbatches
    4
    >>> get("unlatch.methods.fdg:FDG") == get("fdg")
    True
    """
    if isinstance(method, Method):
        return replace(method, **options) if options else method
    return call(f"method {method!r}", _kind(method), options)


def problems(name: str, options: Mapping[str, Any]) -> list[str]:
    """All that is wrong with a name and with options, one line each; nothing if `get` takes them.

    >>> problems("fdg", {"accumulate": 0, "gamma": "x"})
    ['fdg: accumulate must be a whole number, at least 1, got 0', "fdg: gamma must be a number, got 'x'"]
    """
    try:
        kind = _kind(name)
    except ConfigError as error:
        return [str(error)]
    found = [f"method {name!r}: {problem}" for problem in unknown_options(kind, options)]
    known = {option: value for option, value in options.items() if not unknown_options(kind, [option])}
    try:
        call(f"method {name!r}", kind, known)
    except ConfigError as error:
        found += str(error).splitlines()
    return found


def _kind(name: str) -> type[Method]:
    if ":" in name:
        found = import_function("method", name)
        if not (isinstance(found, type) and issubclass(found, Method)) or isabstract(found):
            whole = "with a schedule and rules of its own, got one without" if isabstract(found) else f"got {found!r}"
            raise ConfigError(f"method {name!r}: expected a subclass of unlatch.methods.Method, {whole}")
        return found
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise ConfigError(
            f"there is no method {name!r}.{hint} Known: {', '.join(METHODS)}; or give 'package.module:Class'"
        )
    return METHODS[name]
