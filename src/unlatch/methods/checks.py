"""Checks of single options, so that a wrong one is named where it is given and not where it is first used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..lookup import import_function

__all__ = ["as_function", "check_flag", "check_positive", "check_whole"]


def check_whole(name: str, value: object, low: int) -> None:
    """Raise `ConfigError` unless `value` is a whole number, `low` or more.

    >>> check_whole("auxnet: depth", True, 1)
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: auxnet: depth must be a whole number, at least 1, got True
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be a whole number, at least {low}, got {value!r}")


def check_positive(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a finite number above 0.

    >>> check_positive("dni: learning_rate", float("inf"))
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: dni: learning_rate must be above 0 and finite, got inf
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ConfigError(f"{name} must be above 0 and finite, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is true or false; words would all count as true.

    >>> check_flag("auxnet: shared", "no")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: auxnet: shared must be true or false, got 'no'
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


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
