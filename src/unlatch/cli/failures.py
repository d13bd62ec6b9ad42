"""Errors as a user meets them: one readable message and an exit code."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import ConfigError, DataError, PlanError, StageFailed, UnlatchError

__all__ = ["INTERRUPTED", "ReadableErrors", "Reported", "exit_code", "explain"]

INTERRUPTED = 130
_BAD_SETTINGS = (ConfigError, PlanError, DataError)


class Reported(UnlatchError):
    """An error that another process of the same run reports."""


def exit_code(error: BaseException) -> int:
    """2 if the user asked for something impossible, 1 if a run failed.

    >>> exit_code(ConfigError("no such method")), exit_code(UnlatchError("rank 1 is gone"))
    (2, 1)
    """
    cause = error.__cause__ if isinstance(error, Reported) else error
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


class ReadableErrors(TyperGroup):
    """A group of commands that turns Unlatch's own errors into messages. Anything else keeps its trace."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except UnlatchError as error:
            if not isinstance(error, Reported):
                typer.echo(explain(error), err=True)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            sys.stdout.flush()
            raise typer.Exit(INTERRUPTED) from None
