"""What is trained: a model, a batch, a loss and an optimizer, as functions that every process calls for itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ..nn.chain import Model, as_module
from ..nn.tree import Tree
from ..rules.losses import LossFunction, measured
from ..rules.updates import OptimizerFactory, StagePlace, make_optimizer

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """What all systems train alike. It travels to other processes, so its functions must be importable there.

    **Arguments:**

    - `model`: makes the model, with the same weights in every process.
    - `batch`: makes one batch `(x, y)`.
    - `loss_fn`, `optimizer`, `precision`: as in `unlatch.parallelize`.

    >>> import functools
    >>> sgd = functools.partial(torch.optim.SGD, lr=0.1)
    >>> one = Subject(lambda: nn.Linear(2, 1), lambda: (torch.zeros(3, 2), torch.zeros(3, 1)), nn.MSELoss(), sgd)
    >>> one.loss(one.whole(), *one.batch()).shape
    torch.Size([])
    """

    model: Callable[[], Model]
    batch: Callable[[], tuple[Tree, Tree]]
    loss_fn: LossFunction
    optimizer: OptimizerFactory
    precision: Literal["fp32", "bf16"] = "fp32"

    def whole(self) -> nn.Module:
        """The model in one piece."""
        return as_module(self.model())

    def optimizer_of(self, module: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer of a whole model or of a part of it; `None` where there is nothing to train."""
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        if not named:
            return None
        place = StagePlace(0, 1, 0, tuple(name for name, _ in named))
        return make_optimizer(self.optimizer, [parameter for _, parameter in named], place)

    def casting(self) -> AbstractContextManager[object]:
        """What forwards run under."""
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def loss(self, module: nn.Module, x: Tree, y: Tree) -> torch.Tensor:
        """The loss of a batch. A loss of sum and count is their quotient."""
        with self.casting():
            return self.value(module(x), y)

    def value(self, output: Tree, y: Tree) -> torch.Tensor:
        """The loss of an output."""
        return measured(self.loss_fn(output, y))[0]
