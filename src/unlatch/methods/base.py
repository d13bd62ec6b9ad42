"""A method is a schedule plus rules. Everything else about it follows from these two.

To add one: subclass `Method` (or `Delayed`), name it, return a schedule and rules, and `register` it. What the rest of
the library asks a method beyond these two (below the schedule and the rules) has defaults that suit most: generic code
calls these and never asks which method it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from ..errors import ConfigError
from ..lookup import call, did_you_mean
from ..rules.bundle import Rules
from ..rules.predict import NoPrediction, Predictor, predictor
from ..schedule import Schedule
from ..schedule.stability import auto_microbatches, version_gaps
from .options import Whole, check_options
from .planner import Planner

__all__ = ["BASELINE", "ClosedForm", "Delayed", "GradientKind", "Method", "get", "names", "register"]

#: Of backpropagation; that of an older batch; that of a loss of the stage's own.
GradientKind = Literal["exact", "late", "local"]

#: The method that the speed and accuracy of all others are measured against.
BASELINE = "bp"

_KEPT = {"graph": "graphs", "input": "inputs, computed again", "reverse": "nothing where reversible, else inputs"}


@dataclass(frozen=True)
class ClosedForm:
    """A delayed method as a recursion over micro-batches: what `unlatch.reference.recursion` must know of it.

    **Arguments:**

    - `gaps`: per stage, micro-batches between the weights of a forward and those its gradient is applied to.
    - `lag`: if above 0, all stages run forwards at weights of so many updates ago instead.
    - `per_update`: micro-batches per update.
    - `recompute`, `predict`, `gamma`, `beta`: as for `recursion`.
    """

    gaps: tuple[int, ...]
    lag: int
    per_update: int
    recompute: bool
    predict: str
    gamma: float
    beta: float

    def forward_version(self, stage: int, micro: int) -> int:
        """Updates that the weights of a forward have seen.

        >>> ClosedForm((3, 0), 0, 2, False, "none", 1.0, 1.0).forward_version(0, 5)
        1
        """
        if self.lag:
            return max(0, micro // self.per_update - self.lag)
        return max(0, micro - self.gaps[stage]) // self.per_update


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

    def gaps(self, stages: int) -> tuple[int, ...]:
        """Per stage, micro-batches between the weights a forward sees and those its gradient is applied to."""
        schedule = self.schedule(stages)
        if schedule.flushes:
            return (0,) * stages
        first = int(getattr(schedule, "backward_first", False))
        return tuple(max(0, schedule.delay(s) - first) for s in range(stages))

    def staleness(self, stages: int) -> tuple[float, ...]:
        """Per stage, the mean number of updates between forward and backward that theory gives."""
        return tuple(gap / self.per_update for gap in self.gaps(stages))

    @property
    def recomputes(self) -> bool:
        """Whether stages below the last run every forward twice."""
        return self.rules().activations != "graph"

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
        return self.rules().activations == "reverse"

    @property
    def keeps(self) -> str:
        """What stays of a batch between its forward and its backward, in words."""
        return _KEPT[self.rules().activations]

    def weight_copies(self, stages: int) -> int:
        """Old, predicted or averaged weights beside the current ones, at the first stage.

        >>> get("pipedream", microbatches=2).weight_copies(4)
        2
        """
        rules = self.rules()
        gap = round(self.staleness(stages)[0] * self.per_update)
        old = max(version_gaps(gap, self.per_update)) if rules.weights == "stash" else 0
        return old + (rules.weights == "average") + (rules.predictor is not None)

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

    @property
    def inexact_at_rest(self) -> str | None:
        shrinks = "beta shrinks gradients on their way down, so they differ from backpropagation's on purpose"
        return None if self.beta == 1.0 else shrinks

    def closed_form(self, stages: int) -> ClosedForm | str:
        rules = self.rules()
        if self.schedule(stages).flushes:
            return f"{self.name} has no delay"
        if not rules.average:
            return "gradients of several batches are added up here, and the recursion averages them"
        if rules.weights in ("latest", "average"):
            return f"backward weights of the kind {rules.weights!r} have no closed form here"
        if rules.activations == "reverse":
            return "reversible stages reconstruct their inputs, which is approximate by design"
        if rules.activations == "input" and rules.weights == "stash":
            return "inputs kept together with old weights have no closed form here"
        if not isinstance(self.predict, str):
            return f"the recursion has no predictor {self.predict!r}"
        return ClosedForm(
            self.gaps(stages), rules.lag, self.per_update, self.recomputes, self.predict, self.gamma, self.beta
        )

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
