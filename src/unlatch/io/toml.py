"""The writing half of TOML, which the standard library lacks: just enough for settings.

Tables of the first level become sections, deeper ones are written in line. Whatever `dumps` writes, `tomllib` reads
back as the same values; `None` has no form in TOML and is left out.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}


def dumps(table: Mapping[str, Any]) -> str:
    """Write `table` as TOML text.

    >>> print(dumps({"title": "x", "run": {"seed": 0, "split": ["body.4"], "out": None}}), end="")
    title = "x"
    <BLANKLINE>
    [run]
    seed = 0
    split = ["body.4"]
    """
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    parts = [_lines(plain)] if plain else []
    for key, value in table.items():
        if isinstance(value, Mapping):
            parts.append(f"[{_key(key)}]\n{_lines(value)}")
    return "\n".join(parts)


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if value is not None)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    return '"' + "".join(_ESCAPES.get(c) or (c if c.isprintable() else _unicode(c)) for c in text) + '"'


def _unicode(character: str) -> str:
    return f"\\U{ord(character):08X}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        # A NumPy scalar is a float whose own repr names its type.
        return repr(int(value) if isinstance(value, int) else float(value))
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, Mapping):
        items = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    raise TypeError(f"{value!r} ({type(value).__name__}) has no form in TOML")
