"""What delay costs a given setting: the stability advisor, asked with a method's gaps and an optimizer's momentum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import Config
from ..methods import Method
from ..schedule.stability import Advice, Cure, advise

__all__ = ["Inertia", "advise_method", "flags_of", "inertia_of"]


@dataclass(frozen=True)
class Inertia:
    """How an optimizer carries past gradients on."""

    momentum: float = 0.9
    nesterov: bool = True
    #: Whether the optimizer has Nesterov momentum at all.
    can_nesterov: bool = True


def inertia_of(config: Config) -> Inertia:
    """The momentum of the optimizer in the settings; for Adam and its relatives the decay of the first moment.

    >>> from ..config import load
    >>> inertia_of(load(None, ["model.name=mlp", "optimizer.name=AdamW"]))
    Inertia(momentum=0.9, nesterov=False, can_nesterov=False)
    """
    group = config.optimizer_factory()([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    if "betas" in group:
        return Inertia(float(group["betas"][0]), nesterov=False, can_nesterov=False)
    momentum = group.get("momentum")
    known = float(momentum) if isinstance(momentum, int | float) else 0.0
    return Inertia(known, bool(group.get("nesterov", False)), "nesterov" in group)


def advise_method(method: Method, stages: int, inertia: Inertia, batch_size: int | None = None) -> Advice | None:
    """Judge a method with its micro-batches decided. **Returns:** `None` if no gradient is late.

    >>> from ..methods import get
    >>> advise_method(get("dtr", microbatches=1), 4, Inertia(nesterov=False)).verdicts[0]
    'large loss'
    """
    parts = (method.microbatches if method.microbatches != "auto" else 1) * method.accumulate
    # Theory's staleness rather than the schedule's gaps: a method may run its forwards at older weights than it must.
    gaps = [round(updates * parts) for updates in method.staleness(stages)]
    if not any(gaps):
        return None
    predictor = method.rules().predictor
    return advise(
        gaps,
        momentum=inertia.momentum,
        nesterov=inertia.nesterov,
        predictor=predictor.name if predictor is not None else None,
        alpha=predictor.regulator.alpha if predictor is not None else 1.0,
        microbatches=parts,
        batch_size=batch_size,
        nesterov_available=inertia.can_nesterov,
    )


def flags_of(cure: Cure | None) -> list[str]:
    """The cure as flags of `unlatch train`; nothing if there is none.

    >>> from ..methods import get
    >>> flags_of(advise_method(get("dtr", microbatches=1), 4, Inertia(nesterov=False)).cure)
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
