"""The border between two stages, held together by a penalty or an augmented Lagrangian instead of by backpropagation.

The input `lam` of a stage and the state `x` that its predecessor delivers are two variables. With psi their mismatch
and kappa a multiplier, the training problem is

    L = loss + sum over borders of  beta psi(lam, x) - kappa (lam - x)

Its gradients are local: the predecessor starts its backward from the *seed* `g = kappa + beta dpsi/dx`, and the input
changes along the *jump* `p - g`, where `p` is the gradient that the stage's own backward leaves on its input. At a
solution `lam = x` and `kappa = p`, the adjoint of backpropagation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ConfigError
from ...nn.channels import channel_statistics, normalised, widened

__all__ = ["BorderRule", "corrected", "relaxed_multiplier"]


@dataclass(frozen=True)
class BorderRule:
    """How two tensors at a border are compared.

    **Arguments:**

    - `units`: psi is half the squared distance, averaged over the batch and summed (`"sum"`) or averaged (`"mean"`)
      over the elements of a sample. A beta in units of the mean is as strong as `beta / elements` in units of the sum.
    - `normalise`: compare after bringing every channel to mean 0 and variance 1, so that the two sides cannot agree by
      shrinking to a constant.
    - `downsample`: compare (and send) averages over squares of this many pixels.

    >>> rule = BorderRule(units="sum", normalise=False)
    >>> a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]])
    >>> rule.psi(a, b), rule.gradient(a, b)
    (tensor(2.5000), tensor([[1., 2.]]))
    """

    units: Literal["mean", "sum"] = "mean"
    normalise: bool = True
    downsample: int = 1

    def __post_init__(self) -> None:
        if self.units not in ("mean", "sum"):
            raise ConfigError(f'units must be "mean" or "sum", got {self.units!r}')
        if not isinstance(self.downsample, int) or self.downsample < 1:
            raise ConfigError(f"downsample must be a whole number of pixels, at least 1, got {self.downsample!r}")

    def filter(self, t: Tensor) -> Tensor:
        """What is sent over the border for `t`: itself, or its averages over small squares."""
        if self.downsample == 1 or t.dim() != 4:
            return t
        return F.avg_pool2d(t, self.downsample, ceil_mode=True)

    def psi(self, a: Tensor, b: Tensor) -> Tensor:
        """The mismatch of `a` and a *filtered* `b`."""
        a, b = widened(self.filter(a)), widened(b.detach())
        if self.normalise:
            a, b = normalised(a), normalised(b)
        return (a - b).square().sum() * (0.5 / self._count(a))

    def gradient(self, a: Tensor, b: Tensor) -> Tensor:
        """The gradient of psi in its first argument, of that argument's shape and type."""
        with torch.enable_grad():
            leaf = a.detach().requires_grad_()
            (found,) = torch.autograd.grad(self.psi(leaf, b), leaf)
        return found

    def stiffness(self, a: Tensor) -> Tensor:
        """The curvature of psi at `a`, of a shape that broadcasts: how far a step of relative size theta goes."""
        curvature = torch.full((), 1.0 / self._count(a), dtype=widened(a).dtype, device=a.device)
        return curvature / channel_statistics(widened(a))[1].square() if self.normalise else curvature

    def _count(self, a: Tensor) -> int:
        return a.numel() if self.units == "mean" else a.shape[0]


def corrected(lam: Tensor, jump: Tensor, theta: float, weight: float, stiffness: Tensor) -> Tensor:
    """The auxiliary variable after a step of relative size theta against the jump of the adjoint.

    With psi in units of the sum and beta = `weight` this is `(1 - theta) lam + theta x - (theta / beta) (p - kappa)`.
    """
    return lam - jump * (theta / (weight * stiffness))


def relaxed_multiplier(seed: Tensor, adjoint: Tensor, theta: float) -> Tensor:
    """The multiplier after `kappa - beta (lam_new - x)`: part of the way from the seed used to the adjoint wanted.

    >>> relaxed_multiplier(torch.tensor(0.0), torch.tensor(2.0), 0.25)
    tensor(0.5000)
    """
    return seed + theta * (adjoint - seed)
