"""The number format of forwards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["autocast"]


def autocast(precision: str) -> AbstractContextManager[Any]:
    """A context in which forwards run in `precision`: `"bf16"` casts automatically, `"fp32"` leaves everything alone.

    >>> with autocast("bf16"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    return torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
