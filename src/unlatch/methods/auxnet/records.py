"""What is measured at a border: how far its two sides are apart, in state and in gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...nn.channels import widened
from ..local.statistics import BorderRecord
from .mismatch import BorderRule

if TYPE_CHECKING:
    from .border import BorderMethod

__all__ = ["BorderValues", "measure_border"]


@dataclass(frozen=True)
class BorderValues:
    """What comes together at a border about one micro-batch.

    **Arguments:**

    - `lam`: the input that the stage used.
    - `x`: the state that arrived, as sent; `None` where nothing is compared.
    - `p`: the gradient on the input; `None` where it plays no part.
    - `kappa`: the multiplier.
    - `beta`: the penalty coefficient, times the weight of the micro-batch in its batch.
    """

    lam: Tensor
    x: Tensor | None
    p: Tensor | None
    kappa: Tensor | None
    beta: float


@torch.no_grad()
def measure_border(method: BorderMethod, rule: BorderRule, values: BorderValues, update: int) -> BorderRecord:
    """Compare the two sides of a border."""
    assert values.x is not None
    lam, x = widened(rule.filter(values.lam)), widened(values.x)
    seed: Tensor = -(values.beta * method.pull) * widened(rule.gradient(values.lam, values.x))
    if values.kappa is not None:
        seed = seed + method.kappa_stage * widened(values.kappa)
    jump = 0.0
    if values.p is not None:
        jump = _ratio(widened(values.p) - seed, widened(values.p))
    return BorderRecord(
        update=update,
        violation=_ratio(lam - x, x),
        jump=jump,
        multiplier=float(values.kappa.norm()) if values.kappa is not None else 0.0,
        loss=float(rule.psi(values.lam, values.x)),
    )


def _ratio(a: Tensor, b: Tensor) -> float:
    return float(a.norm() / b.norm().clamp_min(torch.finfo(b.dtype).tiny))
