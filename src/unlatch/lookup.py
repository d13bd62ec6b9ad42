"""Finding things by name: in a table with a hint for near misses, or by import path `package.module:function`.

Modules of users are looked for where Python looks, and beside their settings file; packages that belong to an extra are
imported where they are needed, with an error that names the extra.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .errors import ConfigError

__all__ = [
    "also_searched",
    "call",
    "did_you_mean",
    "find",
    "import_extra",
    "import_function",
    "nearest",
    "search_also",
    "unknown_options",
]

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was likely meant, if any comes near: first of all one with the same letters in another order.

    >>> nearest("dtpr", ["dtr", "dtrp"]), nearest("ResNet-20", ["resnet20"]), nearest("zzz", ["dtr"])
    ('dtrp', 'resnet20', None)
    """
    lowered = {key.lower(): key for key in known}
    swapped = [key for key in lowered if sorted(key) == sorted(name.lower())]
    close = swapped or difflib.get_close_matches(name.lower(), lowered, 1)
    return lowered[close[0]] if close else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint to put into an error text, or nothing if no known name comes near.

    >>> did_you_mean("resnet-20", ["resnet20", "gpt"])
    " Did you mean 'resnet20'?"
    """
    close = nearest(name, known)
    return f" Did you mean {close!r}?" if close is not None else ""


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
            f"{what} {path!r}: there is no module {error.name!r}; expected it beside the settings file, on "
            "PYTHONPATH or installed"
        ) from error
    except (TypeError, ValueError) as error:
        if module_name and not module_name.startswith(".") and "\0" not in module_name:
            raise  # the module's own
        raise ConfigError(f"{what} {path!r} is not of the form 'package.module:function'") from error
    function = getattr(module, attribute, None)
    if function is not None and not callable(function):
        raise ConfigError(
            f"{what} {path!r}: {attribute} is an object of {type(function).__name__}, made already: expected a class "
            "or a function that makes one"
        )
    if function is None:
        functions = [name for name, value in vars(module).items() if callable(value)]
        raise ConfigError(f"{what} {path!r}: no function {attribute!r} in it.{did_you_mean(attribute, functions)}")
    found: Callable[..., Any] = function
    return found


_ALSO: list[str] = []


def search_also(folder: str | Path) -> None:
    """Look for modules of users in this folder too, after all others; so do processes that are started later."""
    place = str(Path(folder).absolute())
    if place not in sys.path:
        sys.path.append(place)
        _ALSO.append(place)


def also_searched() -> list[str]:
    """The folders that `search_also` has added."""
    return list(_ALSO)


def import_extra(module: str, extra: str, what: str) -> ModuleType:
    """A module of a package that only an extra of this one installs.

    **Arguments:** `what`: that needs it, for the error.

    >>> import_extra("json.decoder", "digits", "the data set 'digits'").__name__
    'json.decoder'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is there, but lacks something itself
        raise ConfigError(
            f"{what} needs the package {package!r}, which is not installed: pip install 'unlatch[{extra}]'"
        ) from error


def unknown_options(function: Callable[..., Any], options: Iterable[str]) -> list[str]:
    """What is wrong with each option that a function does not take; nothing if all is well, or nobody can say.

    >>> unknown_options(lambda width: None, ["width", "widht"])
    ["there is no option 'widht'. Did you mean 'width'? Its options: width"]
    """
    known = _options(function)
    if known is None:
        return []
    listed = f" Its options: {', '.join(known) or 'none'}"
    return [f"there is no option {one!r}.{did_you_mean(one, known)}{listed}" for one in options if one not in known]


def _options(function: Callable[..., Any]) -> list[str] | None:
    """Names of what can be given by name; `None` where that is anything, or not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions in C do not tell
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def call(what: str, function: Callable[..., T], options: Mapping[str, Any], *, ours: bool = False) -> T:
    """`function(**options)`, with a `ConfigError` that lists its options where one is unknown or missing.

    **Arguments:** `ours`: the function is of this package, so that whatever it raises is about its options; in a user's
    own it may be a defect, whose trace is worth seeing.

    >>> call("power", lambda base: base**2, {"base": 3})
    9
    """
    unknown = unknown_options(function, options)
    if unknown:
        raise ConfigError("\n".join(f"{what}: {problem}" for problem in unknown))
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{what}: {error}. Its options: {', '.join(_options(function) or ['any'])}") from error
    except ValueError:
        pass  # it does not tell; calling it will
    try:
        return function(**options)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, MemoryError) as error:
        if not ours:
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(f"{what} cannot be made with {given:.300}: {type(error).__name__}: {error}") from error
