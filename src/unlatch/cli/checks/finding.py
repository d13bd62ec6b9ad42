"""The answer of one check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...errors import UnlatchError

__all__ = ["Finding", "Inapplicable", "Verdict", "find_out"]

Verdict = Literal["ok", "differs", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """Whether a promise holds, and what was seen."""

    check: str
    verdict: Verdict
    text: str


class Inapplicable(Exception):
    """This check says nothing about this model and method, for the reason given."""


def find_out(check: str, look: Callable[[], Finding | str]) -> Finding:
    """Run a check: a text means that all is well, an error of Unlatch that it is not.

    >>> find_out("sums", lambda: "1 + 1 = 2").verdict
    'ok'
    """
    try:
        found = look()
    except Inapplicable as reason:
        return Finding(check, "not applicable", str(reason))
    except UnlatchError as error:
        return Finding(check, "differs", f"{type(error).__name__}: {error}")
    return found if isinstance(found, Finding) else Finding(check, "ok", found)
