"""A method is a schedule plus rules. Everything else about it follows from these two.

To add one: subclass `Method` (or `Delayed`), name it, return a schedule and rules, and `register` it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from ..errors import ConfigError, PlanError
from ..lookup import call, did_you_mean
from ..nn.chain import Block
from ..nn.tree import Tree
from ..plan import BlockCost, Plan, make_plan, profile
from ..rules.bundle import Rules
from ..rules.predict import NoPrediction, Predictor, predictor
from ..runtime.blueprint import Blueprint
from ..runtime.stage import Stage, reverses
from ..runtime.station import ChainStation, Station
from ..schedule import Schedule
from ..schedule.stability import auto_microbatches

__all__ = ["Delayed", "Method", "get", "names", "register"]


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods: a small frozen object, comparable and printable.

    **Arguments:**

    - `microbatches`: cut every batch into this many parts, with one update per batch. Total batch, gradient and
      learning rate stay what they were; delays counted in updates shrink. `"auto"` chooses by the method's rule.
    - `accumulate`: batches per update; their gradients are averaged.
    """

    microbatches: int | Literal["auto"] = "auto"
    accumulate: int = 1

    name: ClassVar[str] = ""
    #: One line for tables.
    summary: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.microbatches != "auto" and (not isinstance(self.microbatches, int) or self.microbatches < 1):
            raise ConfigError(f'{self.name}: microbatches must be "auto" or at least 1, got {self.microbatches!r}')
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ConfigError(
                f"{self.name}: accumulate must be a whole number of batches, at least 1, got {self.accumulate!r}"
            )

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

    def gaps(self, stages: int) -> tuple[int, ...]:
        """Per stage, micro-batches between the weights a forward sees and those its gradient is applied to."""
        schedule = self.schedule(stages)
        return tuple(schedule.lateness(stage) for stage in range(stages))

    def staleness(self, stages: int) -> tuple[float, ...]:
        """Per stage, the mean number of updates between forward and backward that theory gives."""
        parts = (self.microbatches if self.microbatches != "auto" else 1) * self.accumulate
        return tuple(gap / parts for gap in self.gaps(stages))

    # ------------------------------------------------------------- what it plans

    def plan(
        self,
        blocks: Sequence[Block],
        stages: int,
        split: Literal["auto"] | Sequence[str] = "auto",
        sample: tuple[Tree, Tree] | None = None,
        precision: Literal["fp32", "bf16"] = "fp32",
    ) -> Plan:
        """Where a model is cut; `"auto"` measures the blocks on a sample, if there is one."""
        costs = None
        if split == "auto" and sample is not None and 1 < stages < len(blocks):
            costs = profile(blocks, sample[0], precision=precision)
            split = self.balanced_split(blocks, sample[0], stages, costs)
        return make_plan(blocks, stages, costs=costs, recompute=self.recomputes, split=split)

    def balanced_split(
        self, blocks: Sequence[Block], x: Tree, stages: int, costs: Sequence[BlockCost]
    ) -> Literal["auto"] | Sequence[str]:
        """A cut by names where stages cost more than their blocks; `"auto"` where they do not."""
        return "auto"

    def fit_plan(self, plan: Plan, blocks: Sequence[Block], precision: Literal["fp32", "bf16"] = "fp32") -> Plan:
        """A plan that was made without the model at hand, such as one from a file, for the model."""
        if plan.split is None:
            raise PlanError(f"{plan.source} places tasks, but {self.name} trains stages: plan for {self.name}")
        return make_plan(blocks, len(plan.starts), split=plan.split)

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

    # ---------------------------------------------------- what it says about itself

    #: Batches that are processed as one.
    joined_batches: ClassVar[int] = 1
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
            i: ChainStation(
                i,
                Stage(
                    i,
                    count,
                    modules[i],
                    rules,
                    blueprint.options,
                    delay=crossed[i],
                    hands_down_input=i > 0 and reverses(rules, i - 1, count, modules[i - 1]),
                ),
            )
            for i in range(count)
            if blueprint.is_here(i)
        }

    def crossed(self, stages: int) -> list[int]:
        """Per stage, the most updates between the forward and the use of its weights in a gradient."""
        return [math.ceil(updates) for updates in self.staleness(stages)]

    def feeds_every_rank(self) -> bool:
        """Whether every rank is given the data by its own caller."""
        return False

    @property
    def recomputes(self) -> bool:
        """Whether stages below the last run every forward twice."""
        return self.rules().activations != "graph"


@dataclass(frozen=True)
class Delayed(Method):
    """Methods whose gradients arrive late: delay needs care, and these are the means.

    **Arguments:**

    - `predict`: run forwards at weights predicted for the time of their backward: `"none"`, `"difference"`, `"linear"`,
      `"geometric"`, `"constant-gradient"`, or a `Predictor`.
    - `gamma`: the step size of stage k of K is multiplied by `gamma ** (K - k)`.
    - `beta`: every cotangent received from above is multiplied by this (FDG's gradient shrinking).
    """

    predict: str | Predictor = "none"
    gamma: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        predictor(self.predict)
        for name in ("gamma", "beta"):
            value = getattr(self, name)
            if not 0.0 < value <= 1.0:
                raise ConfigError(f"{self.name}: {name} must lie in (0, 1], got {value!r}")

    def _rules(self, **settings: Any) -> Rules:
        chosen = predictor(self.predict)
        predicting = None if isinstance(chosen, NoPrediction) else chosen
        return Rules(predictor=predicting, step_decay=self.gamma, shrink=self.beta, **settings)

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        return auto_microbatches(max(self.gaps(stages)), batch_size)


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

    >>> get("fdg", microbatches=4).microbatches
    4
    """
    if isinstance(method, Method):
        return replace(method, **options) if options else method
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}.{did_you_mean(method, METHODS)} Known: {', '.join(METHODS)}")
    return call(f"method {method!r}", METHODS[method], options)
