"""A method is a schedule plus rules. Everything else about it follows from these two.

To add one: subclass `Method` (or `Delayed`), name it, return a schedule and rules, and `register` it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from ..errors import ConfigError
from ..lookup import call, did_you_mean
from ..rules.bundle import Rules
from ..rules.predict import NoPrediction, Predictor, predictor
from ..schedule import Schedule
from ..schedule.stability import auto_microbatches
from .options import Whole, check_options

__all__ = ["Delayed", "Method", "get", "names", "register"]


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods: a small frozen object, comparable and printable.

    **Arguments:**

    - `microbatches`: cut every batch into this many parts, with one update per batch. Total batch, gradient and
      learning rate stay what they were; delays counted in updates shrink. `"auto"` chooses by the method's rule.
    - `accumulate`: batches per update; their gradients are averaged.
    """

    microbatches: Whole | Literal["auto"] = "auto"
    accumulate: Whole = 1

    name: ClassVar[str] = ""
    #: One line for tables.
    summary: ClassVar[str] = ""

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
        parts = (self.microbatches if self.microbatches != "auto" else 1) * self.accumulate
        return tuple(gap / parts for gap in self.gaps(stages))

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
