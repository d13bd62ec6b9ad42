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
    except ValueError as error:
        raise ConfigError(f"{what} {path!r} is not of the form 'package.module:function'") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{what} {path!r}: no function {attribute!r} in it.{did_you_mean(attribute, functions)}")
    found: Callable[..., Any] = function
    return found


def call(what: str, function: Callable[..., T], options: Mapping[str, Any]) -> T:
    """`function(**options)`, with a `ConfigError` that lists its options where one is unknown or missing.

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
    return function(**options)
