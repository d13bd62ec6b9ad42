"""A multi-layer perceptron: one block per linear layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

from torch import nn

from ..errors import ConfigError
from ..lookup import did_you_mean
from .base import Chain

__all__ = ["MLP"]

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "identity": nn.Identity,
}


class MLP(Chain):
    """Linear layers with an activation after each but the last; inputs of any shape are flattened first.

    Blocks: `layers.0` ... `layers.{n-1}`.

    **Arguments:**

    - `widths`: number of inputs, of units in each hidden layer, and of outputs.
    - `activation`: `"relu"`, `"gelu"`, `"silu"`, `"tanh"`, `"sigmoid"` or `"identity"`.
    - `dropout`: after each activation.
    - `batch_norm`: before each activation.

    >>> import torch
    >>> model = MLP((64, 32, 32, 10), activation="tanh")
    >>> model(torch.zeros(2, 1, 8, 8)).shape, len(model.blocks())
    (torch.Size([2, 10]), 3)
    """

    def __init__(
        self,
        widths: Sequence[int] = (64, 128, 128, 128, 10),
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if len(widths) < 2 or min(widths) < 1:
            raise ConfigError(
                f"widths {tuple(widths)} do not make an MLP: expected inputs, hidden ..., outputs, each > 0"
            )
        if activation not in _ACTIVATIONS:
            hint = did_you_mean(activation, _ACTIVATIONS)
            raise ConfigError(f"unknown activation {activation!r}.{hint} Known: {', '.join(_ACTIVATIONS)}")
        last = len(widths) - 2
        self.layers = nn.Sequential()
        for i, (inputs, outputs) in enumerate(pairwise(widths)):
            parts: OrderedDict[str, nn.Module] = OrderedDict()
            if i == 0:
                parts["flatten"] = nn.Flatten()
            parts["linear"] = nn.Linear(inputs, outputs)
            if i < last and batch_norm:
                parts["norm"] = nn.BatchNorm1d(outputs)
            if i < last:
                parts["activation"] = _ACTIVATIONS[activation]()
            if i < last and dropout:
                parts["dropout"] = nn.Dropout(dropout)
            self.layers.append(nn.Sequential(parts))

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)
