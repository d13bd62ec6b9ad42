"""Where text goes: people read stdout, unless a machine does (`--json`), then people read stderr."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

__all__ = ["emit_json", "people"]


def people(as_json: bool = False) -> Console:
    """A console for people: never wraps or re-styles what it is given. Honours NO_COLOR.

    **Arguments:** `as_json`: whether stdout belongs to a machine.
    """
    return Console(stderr=as_json, highlight=False, markup=False, emoji=False, soft_wrap=True)


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout. Numbers that JSON lacks become text."""
    sys.stdout.write(json.dumps(_plain(value), indent=1) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
