"""Whether tensors hold NaN or infinite values: one cheap look at all of them, and which one it is."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["all_finite", "first_not_finite"]

_FEW = 4


def all_finite(tensors: Sequence[Tensor], norm: Tensor | None = None) -> bool:
    """Whether no value is NaN or infinite. **Arguments:** `norm`: of all of them together, if it is known.

    >>> all_finite([torch.ones(2), torch.tensor([1.0, torch.inf])])
    False
    """
    if not tensors:
        return True
    # A sum is the cheapest thing that NaN and infinity leave a trace in. Large finite values may overflow in it too.
    total = norm if norm is not None else _total([_numbers(t).sum(dtype=torch.float32) for t in tensors])
    return math.isfinite(float(total)) or all(bool(_numbers(t).isfinite().all()) for t in tensors)


def first_not_finite(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """The name of the first tensor that has a value that is not finite.

    >>> first_not_finite([("bias", torch.zeros(1)), ("weight", torch.tensor([torch.nan]))])
    'weight'
    """
    return next((name for name, t in named if t is not None and not bool(_numbers(t).isfinite().all())), "?")


def _total(sums: Sequence[Tensor]) -> Tensor:
    # Few numbers are added up sooner than they are put into one tensor.
    return functools.reduce(torch.add, sums) if len(sums) < _FEW else torch.stack(list(sums)).sum()


def _numbers(t: Tensor) -> Tensor:
    t = t.detach() if t.requires_grad else t
    t = t.coalesce().values() if t.is_sparse else t
    return torch.view_as_real(t) if t.is_complex() else t
