"""Options of methods, read from the annotations of their fields: what each may be, checked once for all methods.

A field may be a `Literal`, an `int`, a `float`, a `bool`, `None`, or a union of these; `at_least` and `Positive` bound
numbers. Pydantic checks them. Whatever else a field holds (functions, predictors, ramps) is checked by its owner.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch import nn

from ..errors import ConfigError
from ..lookup import import_function

__all__ = ["Positive", "Whole", "as_function", "at_least", "check_options", "choices", "owner"]


def at_least(low: int) -> Any:
    """The bound of a whole number, as in `Annotated[int, at_least(0)]`. Its description is for errors."""
    return Field(ge=low, description=f"a whole number, at least {low}")


Whole: TypeAlias = Annotated[int, at_least(1)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False, description="above 0 and finite")]


def check_options(method: Any) -> None:
    """Raise `ConfigError`, with a line for each, if fields of a dataclass with a `name` are not what annotations say.

    >>> from unlatch.methods import PETRA
    >>> PETRA(order="2f2b")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: petra: order must be one of ticked, 1f1b, got '2f2b'
    """
    wrong = []
    for option, (words, adapter) in _checks(method.__class__).items():
        value = getattr(method, option)
        try:
            adapter.validate_python(value)
        except ValidationError:
            wrong.append(f"{method.name}: {option} must be {words}, got {value!r}")
    if wrong:
        raise ConfigError("\n".join(wrong))


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


@cache
def _checks(method: type) -> dict[str, tuple[str, TypeAdapter[Any]]]:
    """What each option must be, in words and for pydantic, where its annotation says."""
    found = {option: hint for option, hint in _hints(method).items() if option in method.__dataclass_fields__}  # type: ignore[attr-defined]
    words = {option: _words(hint) for option, hint in found.items()}
    strict = ConfigDict(strict=True)
    return {option: (said, TypeAdapter(found[option], config=strict)) for option, said in words.items() if said}


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


_KINDS = {bool: "true or false", int: "a whole number", float: "a number"}


def _words(hint: Any) -> str | None:
    """What a value must be; `None` if it may be something that annotations do not tell."""
    # Words first, numbers with their bounds last. That nothing may be given instead goes without saying.
    members = sorted(_members(hint), key=lambda member: not _is_literal(member))
    said = [_word(member, alone=len(members) == 1) for member in members if member is not type(None)]
    return None if None in said else " or ".join(filter(None, said))


def _word(hint: Any, alone: bool) -> str | None:
    if _is_literal(hint):
        return f"one of {', '.join(get_args(hint))}" if alone else " or ".join(f'"{word}"' for word in get_args(hint))
    if get_origin(hint) is Annotated:
        return next((bound.description for bound in hint.__metadata__ if bound.description), None)
    return _KINDS.get(hint)
