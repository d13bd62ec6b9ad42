"""What is measured at a border: how far its two sides are apart, in state and in gradient."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...nn.channels import widened
from .mismatch import BorderRule

if TYPE_CHECKING:
    from .border import BorderMethod

__all__ = ["BorderRecord", "BorderValues", "measure_border"]


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


@dataclass(frozen=True)
class BorderRecord:
    """One measurement.

    **Arguments:**

    - `update`: when.
    - `violation`: distance between predicted input and arriving state, relative to the state.
    - `jump`: distance between the gradient on the input and the seed given to the stage below, relative to the former.
    - `multiplier`: norm of the multiplier, 0 without one (and where it is only guessed on the other side).
    - `loss`: psi, what the prediction is asked to lower.
    """

    update: int
    violation: float
    jump: float
    multiplier: float
    loss: float

    def metrics(self, border: int) -> dict[str, float]:
        """The numbers under names for `unlatch.io.metrics`."""
        numbers = {k: v for k, v in asdict(self).items() if k != "update"}
        return {f"border{border}/{name}": value for name, value in numbers.items()}


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
