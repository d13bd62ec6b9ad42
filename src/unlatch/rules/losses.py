"""What a loss function may return: a mean over samples, or a sum with the number of things that it adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from ..errors import ConfigError

__all__ = ["LossFunction", "measured", "taken_apart"]

#: Of output and target.
LossFunction: TypeAlias = Callable[[Any, Any], Any]


def taken_apart(found: Any) -> tuple[Tensor, float | None]:
    """What a loss function returned, as a tensor and a count: `None` for a mean over samples.

    >>> import torch
    >>> taken_apart((torch.tensor(6.0), 3))
    (tensor(6.), 3.0)
    """
    if isinstance(found, Tensor):
        return found, None
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[0], Tensor):
        raise ConfigError(
            f"a loss function returns a tensor, the mean over samples, or a pair (sum, count), got {_shown(found)}"
        )
    total, counted = found
    if isinstance(counted, Tensor) and counted.numel() == 1:
        counted = counted.item()
    if isinstance(counted, bool) or not isinstance(counted, int | float) or not counted >= 0:
        raise ConfigError(
            f"a loss function that returns (sum, count) must count with one number, 0 or more, got {_shown(found[1])}"
        )
    return total, float(counted)


def measured(found: Any) -> tuple[Tensor, float | None]:
    """What a loss function returned, as a mean and the number of things that it is over, if that is known.

    >>> import torch
    >>> measured((torch.tensor(6.0), 3)), measured(torch.tensor(0.5))
    ((tensor(2.), 3.0), (tensor(0.5000), None))
    """
    total, count = taken_apart(found)
    return (total, None) if count is None else (total / (count or 1.0), count)


def _shown(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    return f"{type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else repr(found)
