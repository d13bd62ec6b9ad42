"""Statistics per channel: the second dimension, or the last one of tokens `(batch, position, channel)`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["channel_shape", "channel_statistics", "normalised", "widened"]

_EPS = 1e-5


def widened(t: Tensor) -> Tensor:
    """The tensor itself, or in single precision if it has less."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def _channel_axis(dims: int) -> int:
    return 2 if dims == 3 else 1


def channel_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one number per channel, for samples of `shape`, that broadcasts over batch and positions.

    >>> channel_shape((16, 8, 8))
    (1, 16, 1, 1)
    """
    axis = _channel_axis(len(shape) + 1) - 1
    return (1, *(size if i == axis else 1 for i, size in enumerate(shape)))


def normalised(t: Tensor) -> Tensor:
    """Every channel with mean 0 and variance 1 over the batch, without learned factors.

    >>> normalised(torch.tensor([[1.0], [3.0]])).round(decimals=2)
    tensor([[-1.],
            [ 1.]])
    """
    second = t.transpose(1, 2) if t.dim() == 3 else t
    if second.numel() == second.shape[1]:
        # One value per channel has no spread.
        return t - t.detach()
    out = F.batch_norm(second, None, None, training=True, eps=_EPS)
    return out.transpose(1, 2) if t.dim() == 3 else out


def channel_statistics(t: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel, in shapes that broadcast against `t`."""
    axes = [axis for axis in range(t.dim()) if axis != _channel_axis(t.dim())]
    variance, mean = torch.var_mean(t, dim=axes, correction=0, keepdim=True)
    return mean, (variance + _EPS).sqrt()
