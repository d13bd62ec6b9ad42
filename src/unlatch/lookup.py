"""Finding things by name: in a table with a hint for near misses, or by import path `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .errors import ConfigError

__all__ = ["call", "did_you_mean", "find", "import_function"]

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to put into an error text, or nothing if no known name comes near.

    >>> did_you_mean("resnet-20", ["resnet20", "gpt"])
    " Did you mean 'resnet20'?"
    """
    close = difflib.get_close_matches(name.lower(), list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def find(what: str, name: str, table: Mapping[str, T]) -> T:
    """`table[name]`, or a `ConfigError` with a hint and all known names.

    >>> find("fruit", "apple", {"apple": 3})
    3
    """
    if name in table:
        return table[name]
    hint = did_you_mean(name, table)
    raise ConfigError(f"unknown {what} {name!r}.{hint} Known: {', '.join(table)}; or give 'package.module:function'")


def import_function(what: str, path: str) -> Callable[..., Any]:
    """The function that `package.module:function` names.

    >>> import_function("root", "math:sqrt")(9.0)
    3.0
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the user's own path is a matter of settings; a module missing inside it is that module's defect.
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ConfigError(
            f"{what} {path!r}: there is no module {error.name!r}; is its folder on PYTHONPATH or installed?"
        ) from error
    except (TypeError, ValueError) as error:
        if module_name and not module_name.startswith(".") and "\0" not in module_name:
            raise  # the module's own
        raise ConfigError(f"{what} {path!r} is not of the form 'package.module:function'") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{what} {path!r}: no function {attribute!r} in it.{did_you_mean(attribute, functions)}")
    found: Callable[..., Any] = function
    return found


def call(what: str, function: Callable[..., T], options: Mapping[str, Any], *, ours: bool = False) -> T:
    """`function(**options)`, with a `ConfigError` that lists its options where one is unknown or missing.

    **Arguments:** `ours`: the function is of this package, so that whatever it raises is about its options; in a user's
    own it may be a defect, whose trace is worth seeing.

    >>> call("power", lambda base: base**2, {"base": 3})
    9
    """
    signature = inspect.signature(function)
    try:
        signature.bind(**options)
    except TypeError as error:
        names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        unknown = [key for key in options if key not in names]
        hint = did_you_mean(unknown[0], names) if unknown else ""
        raise ConfigError(f"{what}: {error}.{hint} Its options: {', '.join(names) or 'none'}") from error
    try:
        return function(**options)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        if not ours:
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"{what} cannot be made with {given:.300}: {type(error).__name__}: {error}") from error
