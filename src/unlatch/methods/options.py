"""Options of methods, read from the annotations of their fields: what each may be, checked once for all methods.

A field may be a `Literal`, an `int`, a `float`, a `bool`, `None`, or a union of these; `AtLeast` and `POSITIVE` bound
numbers. Whatever else a field holds (functions, predictors, ramps) is checked by its owner.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from torch import nn

from ..errors import ConfigError
from ..lookup import import_function

__all__ = ["POSITIVE", "AtLeast", "Positive", "Whole", "as_function", "check_options", "choices", "owner"]


@dataclass(frozen=True)
class AtLeast:
    """The smallest value of a whole number."""

    low: int


#: Marks a number above 0.
POSITIVE = "positive"

Whole: TypeAlias = Annotated[int, AtLeast(1)]
Positive: TypeAlias = Annotated[float, POSITIVE]


def check_options(method: Any) -> None:
    """Raise `ConfigError` if a field of a dataclass with a `name` is not what its annotation says.

    >>> from unlatch.methods import PETRA
    >>> PETRA(order="2f2b")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: petra: order must be one of ticked, 1f1b, got '2f2b'
    """
    for option, (words, fits) in _checks(method.__class__).items():
        value = getattr(method, option)
        if not fits(value):
            raise ConfigError(f"{method.name}: {option} must be {words}, got {value!r}")


def choices(method: type, option: str) -> tuple[str, ...]:
    """The words among the values of an option.

    >>> from unlatch.methods import FDG
    >>> choices(FDG, "weights"), choices(FDG, "microbatches"), choices(FDG, "gamma")
    (('stash', 'latest'), ('auto',), ())
    """
    hint = _hints(method).get(option)
    return tuple(word for member in _members(hint) if _is_literal(member) for word in get_args(member))


def owner(method: type, option: str) -> type | None:
    """The class that introduced an option: two methods mean the same by it only if they have it from the same one.

    >>> from unlatch.methods import DTR, FDG, PETRA
    >>> owner(FDG, "gamma") is owner(DTR, "gamma"), owner(FDG, "weights") is owner(PETRA, "weights")
    (True, False)
    """
    return next((base for base in reversed(method.__mro__) if option in inspect.get_annotations(base)), None)


def as_function(name: str, value: object, of: str) -> Callable[..., Any] | None:
    """The function itself, or the one that `package.module:function` names, as settings files write it.

    A finished network is refused, although it can be called.

    >>> as_function("auxnet: factory", "torch.nn:Identity", "a Border")
    <class 'torch.nn.modules.linear.Identity'>
    >>> as_function("auxnet: factory", nn.Linear(2, 2), "a Border")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: auxnet: factory must be a function of a Border, got a finished network (Linear)
    """
    if isinstance(value, str) and ":" in value:
        return import_function(name, value)
    if value is None or (callable(value) and not isinstance(value, nn.Module)):
        return value
    got = f"a finished network ({type(value).__name__})" if isinstance(value, nn.Module) else repr(value)
    also = ", or the name of one as 'package.module:function'" if isinstance(value, str) else ""
    raise ConfigError(f"{name} must be a function of {of}{also}, got {got}")


Check: TypeAlias = tuple[str, Callable[[Any], bool]]


@cache
def _checks(method: type) -> dict[str, Check]:
    found = {option: _check(hint) for option, hint in _hints(method).items() if option in method.__dataclass_fields__}  # type: ignore[attr-defined]
    return {option: check for option, check in found.items() if check is not None}


@cache
def _hints(method: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(method.__mro__):
        with suppress(NameError):  # names of a class inside a function cannot be looked up; those of its bases can
            found |= get_type_hints(base, include_extras=True)
    return found


def _is_literal(hint: Any) -> bool:
    return bool(get_origin(hint) == Literal)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _check(hint: Any) -> Check | None:
    """What a value must be, in words, and whether one is; `None` if its annotation does not say."""
    # Words first, numbers with their bounds last. That nothing may be given instead goes without saying.
    members = sorted(_members(hint), key=lambda member: not _is_literal(member))
    checks = [_single(member, alone=len(members) == 1) for member in members]
    known = [check for check in checks if check is not None]
    if len(known) < len(checks):
        return None
    return " or ".join(words for words, _ in known if words), lambda value: any(fits(value) for _, fits in known)


def _single(hint: Any, alone: bool) -> Check | None:
    kind, bounds = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
    if _is_literal(kind):
        allowed = get_args(kind)
        words = f"one of {', '.join(allowed)}" if alone else " or ".join(f'"{word}"' for word in allowed)
        return words, lambda value: isinstance(value, str) and value in allowed
    if kind is bool:
        return "true or false", lambda value: isinstance(value, bool)
    if kind is int:
        low = next((bound.low for bound in bounds if isinstance(bound, AtLeast)), None)
        words = "a whole number" if low is None else f"a whole number, at least {low}"
        return words, lambda value: _is(int, value) and (low is None or value >= low)
    if kind is float and POSITIVE in bounds:
        return "above 0 and finite", lambda value: _is(int | float, value) and 0 < value < math.inf
    if kind is float:
        return "a number", lambda value: _is(int | float, value)
    return ("", lambda value: value is None) if kind is type(None) else None


def _is(kind: Any, value: Any) -> bool:
    """An instance, where truth values are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)
