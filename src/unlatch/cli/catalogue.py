"""What can be said about a method without running it: locks, delay, what it keeps, its options."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_args

from ..errors import ConfigError
from ..methods import GradientKind, Method, get, names
from ..methods.options import choices

__all__ = ["Facts", "Option", "catalogue", "facts", "options"]

_ORDER = get_args(GradientKind)


@dataclass(frozen=True)
class Facts:
    """One method at a number of stages, with its micro-batches decided.

    **Arguments:**

    - `gradient`: `exact` (that of backpropagation), `late` (that of an older batch), or `local` (of a loss of its own).
    - `lateness`: micro-batches between forward and backward weights of stage 0; `staleness` the same in updates.
    - `kept`: what stays of a batch between its forward and its backward.
    - `weight_copies`: old, predicted or averaged weights beside the current ones, at stage 0.
    """

    name: str
    summary: str
    gradient: GradientKind
    microbatches: int
    lateness: int
    staleness: float
    kept: str
    weight_copies: int


def facts(name: str, stages: int, microbatches: int | None = None) -> Facts:
    """Describe a method.

    >>> found = facts("pipedream", 4)
    >>> found.lateness, found.microbatches, found.staleness, found.weight_copies
    (3, 4, 0.75, 1)
    """
    method = _resolved(name, stages, microbatches)
    method.schedule(stages)  # refuses numbers of stages that do not suit it
    staleness = method.staleness(stages)[0]
    return Facts(
        name=name,
        summary=method.summary,
        gradient=method.gradient,
        microbatches=method.per_batch,
        lateness=round(staleness * method.per_update),
        staleness=staleness,
        kept=method.keeps,
        weight_copies=method.weight_copies(stages),
    )


def catalogue(stages: int, microbatches: int | None = None) -> list[Facts]:
    """All registered methods by families: those that wait for each other first, then by delay."""
    return sorted(
        (_facts_if_possible(name, stages, microbatches) for name in names()),
        key=lambda one: (_ORDER.index(one.gradient), one.lateness),
    )


def _facts_if_possible(name: str, stages: int, microbatches: int | None) -> Facts:
    """A method that cannot work with so few micro-batches is shown with its own number of them."""
    try:
        return facts(name, stages, microbatches)
    except ConfigError:
        return facts(name, stages)


@dataclass(frozen=True)
class Option:
    """One thing to set, with what its class says about it; `choices` are the words it may be, if any."""

    name: str
    default: Any
    choices: tuple[str, ...]
    text: str


def options(method: Method) -> list[Option]:
    """What can be set, from the fields of the class and its documentation.

    >>> [option.name for option in options(get("bp"))]
    ['microbatches', 'accumulate']
    """
    kind = type(method)
    texts = _described(kind)
    return [
        Option(field.name, _default(field), choices(kind, field.name), texts.get(field.name, ""))
        for field in fields(method)
    ]


def _resolved(name: str, stages: int, microbatches: int | None) -> Method:
    return get(name, **({} if microbatches is None else {"microbatches": microbatches})).resolve(stages)


def _default(field: Field[Any]) -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else None


def _described(kind: type) -> dict[str, str]:
    """Texts of the items `- `name`, `name`: text` in the documentation of a class and its bases, nearest first."""
    found: dict[str, str] = {}
    for owner in kind.__mro__:
        document = owner.__doc__ or ""
        items = re.findall(
            r"(?:- |\*\*Arguments:\*\* )((?:`\w+`(?:, )?)+): (.*?)(?=\n\s*\n|\n\s*- `|\Z)", document, re.S
        )
        for heads, text in items:
            for name in re.findall(r"`(\w+)`", heads):
                found.setdefault(name, " ".join(text.split()))
    return found
