"""What is trained: a model, a batch, a loss and an optimizer, as functions that every process calls for itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..nn.chain import Model, as_module
from ..nn.tree import Tree
from ..rules.losses import LossFunction, measured
from ..rules.updates import OptimizerFactory, StagePlace, make_optimizer

__all__ = ["Subject", "Updates"]


@dataclass(frozen=True)
class Subject:
    """What all systems train alike. It travels to other processes, so its functions must be importable there.

    **Arguments:**

    - `model`: makes the model, with the same weights in every process.
    - `batch`: makes one batch `(x, y)`.
    - `loss_fn`, `optimizer`, `precision`, `lr_scheduler`: as in `unlatch.parallelize`; schedules step at every update.

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
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None

    def whole(self) -> nn.Module:
        """The model in one piece."""
        return as_module(self.model())

    def casting(self) -> AbstractContextManager[object]:
        """What forwards run under."""
        return torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def loss(self, module: Callable[[Tree], Tree], x: Tree, y: Tree) -> torch.Tensor:
        """The loss of a batch. A loss of sum and count is their quotient."""
        with self.casting():
            output = module(x)
        return self.value(output, y)

    def value(self, output: Tree, y: Tree) -> torch.Tensor:
        """The loss of an output."""
        with self.casting():
            return measured(self.loss_fn(output, y))[0]


class Updates:
    """Optimizer and learning-rate schedule of a whole model or of a part of it, which may have nothing to train.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> one = Subject(lambda: model, lambda: (None, None), nn.MSELoss(), lambda ps: torch.optim.SGD(ps, lr=1.0))
    >>> updates, before = Updates(one, model), model.weight.item()
    >>> model.weight.grad = torch.ones(1, 1)
    >>> updates.apply()
    >>> round(before - model.weight.item(), 6)
    1.0
    """

    def __init__(self, subject: Subject, module: nn.Module) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        if named:
            place = StagePlace(0, 1, 0, tuple(name for name, _ in named))
            self._optimizer = make_optimizer(subject.optimizer, [parameter for _, parameter in named], place)
            self._scheduler = subject.lr_scheduler(self._optimizer) if subject.lr_scheduler is not None else None

    def clear(self) -> None:
        """Forget the gradients of the step before."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def apply(self) -> None:
        """Follow the gradients."""
        if self._optimizer is not None:
            self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
