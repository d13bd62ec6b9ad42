"""Whether a loss suits methods that weigh it against the mismatch at a border or a head."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...errors import ConfigError
from ...nn.tree import map_tensors
from ...rules.losses import measured

__all__ = ["check_loss"]


def check_loss(name: str, loss_fn: Any, output: Any, target: Any, microbatches: int = 1) -> None:
    """A loss that is no scalar, has no gradient or sums over samples cannot be weighed against a border's mismatch.

    >>> from torch.nn.functional import mse_loss
    >>> check_loss("auxnet", mse_loss, torch.ones(2, 1), torch.zeros(2, 1))
    >>> check_loss("auxnet", lambda out, y: out - y, torch.ones(2, 1), torch.zeros(2, 1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: auxnet needs a loss that is one number, got a tensor of shape (2, 1): let loss_fn ...
    """
    leaf = map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), output)
    loss, count = measured(loss_fn(leaf, target))
    if count is not None and microbatches > 1:
        raise ConfigError(
            f"{name} weighs the loss of every micro-batch by its samples, and this one counts something else (it "
            f"returns (sum, count)): set microbatches=1, got {microbatches}"
        )
    if loss.dim() != 0:
        raise ConfigError(
            f"{name} needs a loss that is one number, got a tensor of shape {tuple(loss.shape)}: let loss_fn return "
            "the mean over samples"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"{name}: the loss has no gradient in the network's output, so there is nothing to learn from"
        )
    double = map_tensors(lambda t: torch.cat([t, t]), (leaf, target))
    with torch.no_grad():
        twice = float(measured(loss_fn(*double))[0])
    value = float(loss.detach())
    if value and math.isclose(twice, 2 * value, rel_tol=1e-3):
        raise ConfigError(
            f"{name}: the loss of a batch given twice is twice as large, so it sums over samples; the mismatch at "
            "borders is "
            'a mean, which a sum would outweigh more and more with the batch size. Use a mean (reduction="mean").'
        )
