"""What the command line says, to whom: text for people, JSON for machines, errors with exit codes, advice as flags.

People read stdout, unless a machine does (`--json`), then people read stderr.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..errors import CallbackFailed, ConfigError, DataError, PlanError, StageFailed, UnlatchError

if TYPE_CHECKING:
    from ..advise.advice import Cure

__all__ = ["Reported", "emit_json", "exit_code", "explain", "flags_of", "people"]


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


_BAD_SETTINGS = (ConfigError, PlanError, DataError)


class Reported(UnlatchError):
    """An error that another process of the same run reports."""


def exit_code(error: BaseException) -> int:
    """2 if the user asked for something impossible, 1 if a run failed.

    >>> exit_code(ConfigError("no such method")), exit_code(UnlatchError("rank 1 is gone"))
    (2, 1)
    """
    cause = error.__cause__ if isinstance(error, Reported | CallbackFailed) else error
    return 2 if isinstance(cause, _BAD_SETTINGS) else 1


def explain(error: UnlatchError) -> str:
    """The message; for a failure in user code with the original traceback, once.

    >>> explain(ConfigError("stages must be at least 1"))
    'error: stages must be at least 1'
    """
    text = f"error: {error}"
    if not isinstance(error, StageFailed) or "Traceback" in text:
        return text
    notes = list(getattr(error, "__notes__", []))
    if not notes and error.__cause__ is not None:
        notes = ["".join(traceback.format_exception(error.__cause__))]
    return "\n\n".join([text, *notes]).rstrip()


_QUOTES = "'\""


def flags_of(cure: Cure | None) -> list[str]:
    """What to add to the command line; nothing if there is no cure.

    >>> from ..advise.advice import Cure
    >>> flags_of(Cure(("microbatches=4", "nesterov=True"), "", 0.18, "about bp"))
    ['as flags: --set method.microbatches=4 --set optimizer.nesterov=true']
    """
    if cure is None:
        return []
    return ["as flags: " + " ".join(f"--set {_setting(change)}" for change in cure.changes)]


def _setting(change: str) -> str:
    """`nesterov=True` in Python is `optimizer.nesterov=true` in a settings file."""
    name, _, value = change.partition("=")
    section = "optimizer" if name == "nesterov" else "method"
    return f"{section}.{name}={value.strip(_QUOTES).replace('True', 'true')}"
