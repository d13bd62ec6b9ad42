"""The advisor's cure as flags of `unlatch train`."""

from __future__ import annotations

from ..schedule.stability import Cure

__all__ = ["flags_of"]

_QUOTES = "'\""


def flags_of(cure: Cure | None) -> list[str]:
    """What to add to the command line; nothing if there is no cure.

    >>> from ..schedule.stability import advise
    >>> flags_of(advise([5, 3, 1, 0], momentum=0.9).cure)
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
