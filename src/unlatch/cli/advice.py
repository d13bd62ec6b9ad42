"""The advisor's cure as flags of `unlatch train`."""

from __future__ import annotations

from ..schedule.stability import Cure

__all__ = ["flags_of"]


def flags_of(cure: Cure | None) -> list[str]:
    """What to add to the command line; nothing if there is no cure.

    >>> from ..schedule.stability import advise
    >>> flags_of(advise([5, 3, 1, 0], momentum=0.9).cure)
    ['as flags: --set method.microbatches=4 --set optimizer.nesterov=true']
    """
    if cure is None:
        return []
    settings = {
        "microbatches": f"method.microbatches={cure.microbatches}",
        "nesterov": "optimizer.nesterov=true",
        "predictor": f"method.predict={cure.predictor}",
    }
    return ["as flags: " + " ".join(f"--set {settings[change.partition('=')[0]]}" for change in cure.changes)]
