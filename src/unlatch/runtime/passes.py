"""One pass over the module of a stage: its random numbers, precision, running statistics and, at the end, the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import NonFiniteLoss, ShapeMismatch
from ..nn.compiled import Compilation, Compiled
from ..nn.device import CPU, HALVES, Device
from ..nn.randomness import mixed_seed, replayable
from ..nn.statistics import frozen_statistics
from ..nn.tree import Tree, unflatten
from ..rules.kept import Kept
from ..rules.losses import LossFunction, taken_apart
from ..rules.updates import OptimizerFactory
from .measuring import Measured
from .scaling import LossScale
from .updating import Optimizer
from .whole_batch import WholeBatch

__all__ = ["Passes", "StageOptions"]


@dataclass(frozen=True)
class StageOptions:
    """What the user chose, the same for every stage."""

    loss_fn: LossFunction
    optimizer: OptimizerFactory
    lr_scheduler: Callable[[Optimizer], Any] | None = None
    lr_scale: Callable[[int], float] | None = None
    clip_grad_norm: float | None = None
    clip_norm_of: Literal["stage", "model"] = "stage"
    precision: str = "fp32"
    seed: int = 0
    nonfinite: Literal["stop", "skip", "ignore"] = "stop"
    device: Device = CPU
    #: Which replica of the network the stage belongs to.
    column: int = 0
    #: How forwards of training are compiled, if they are.
    compilation: Compilation | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which forwards run in the precision that was chosen."""
        return self.device.autocast(self.precision)

    def random(self, stream: int, micro: int) -> replayable:
        """A context whose random numbers depend on the run's seed, a stream of numbers and a micro-batch."""
        # Replicas see other rows, and draw other masks for them.
        seed = mixed_seed(self.seed, self.column, 0) if self.column else self.seed
        return replayable(seed, stream, micro, self.device)

    def passing(self, stream: int, micro: int) -> AbstractContextManager[Any]:
        """A context with the random numbers and the precision of a pass over a module."""
        random = self.random(stream, micro)
        return random if self.precision == "fp32" else _both(random, self.autocast())

    @property
    def clips_whole_norm(self) -> bool:
        """Whether gradients are limited by the norm of the whole model's."""
        return self.clip_grad_norm is not None and self.clip_norm_of == "model"

    @property
    def checks_finite(self) -> bool:
        """Whether losses, gradients and weights are looked at before they are used."""
        return self.nonfinite != "ignore"


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class Passes(Measured):
    """The half of a `Stage` that evaluates its module, whatever for.

    **Arguments:**

    - `index`, `stages`: its place; random numbers depend on the first.
    - `counts_add_up`: whether a loss that comes as a sum with a count is divided once, when an update applies all
      gradients, so that unequal micro-batches weigh as they would in one batch; otherwise each is a mean by itself.
    """

    def __init__(
        self, index: int, stages: int, module: nn.Module, options: StageOptions, *, counts_add_up: bool = True
    ) -> None:
        # Under autocast an inverse written by the user may compute in half precision.
        super().__init__(module, 5e-2 if options.precision in HALVES else None)
        self.index = index
        self.first = index == 0
        self.last = index == stages - 1
        self.module = module
        self.options = options
        #: Of the newest forward: its mean loss, which `float` reads, and what that is a mean over, if the loss function
        #: counts.
        self.loss: Any = None
        self.count: float | None = None
        self.counts_add_up = counts_add_up
        #: By what gradients are scaled, in half precision that needs it.
        self.scaling = LossScale() if options.precision == "fp16" else None
        self.whole = WholeBatch(options.loss_fn)
        how = options.compilation
        self.compiled = Compiled(module, how, f"stage {index}", self.whole.news.append) if how is not None else None
        self._network: Callable[[Tree], Tree] = self.compiled or module
        self._statistics = frozen_statistics(module)

    def run(self, kept: Kept) -> Tree:
        """Evaluate the module and, at the last stage, the loss."""
        with self.passing(kept):
            outputs = self._network(unflatten(kept.spec, kept.inputs))
            if not self.last:
                return outputs
            loss = self._checked_loss(self.options.loss_fn(outputs, kept.target), kept.micro)
            self.whole.add(kept.micro, outputs, kept.target, self.loss, self.count)
        return loss

    def passing(self, kept: Kept) -> AbstractContextManager[Any]:
        """Random numbers and precision of a pass over the module."""
        return self.options.passing(self.index, kept.micro.id)

    def counting(self, counts: bool) -> AbstractContextManager[Any]:
        """Whether running statistics count what runs inside: of two passes over a micro-batch, one."""
        return nullcontext() if counts else self._statistics

    def _progress(self) -> str:
        """How far training is, to add to messages."""
        return ""

    def _checked_loss(self, found: Any, micro: Any) -> Tensor:
        """What a backward starts from: the loss of a micro-batch by its share in the batch."""
        loss, self.count = taken_apart(found)
        if loss.numel() != 1:
            raise ShapeMismatch(
                f"the loss must be one number, got a tensor of shape {tuple(loss.shape)} for {micro}: let loss_fn take "
                "the mean (and say loss_reduction='sum' if it adds instead), or return (sum, count)"
            )
        mean = loss if self.count is None else loss / (self.count or 1.0)
        self.loss = value = self.options.device.reading(mean.detach())
        # Where the host does not wait for the loss, its gradients tell: they are looked at before they are applied.
        if self.options.checks_finite and type(value) is float and not math.isfinite(value):
            found = f"the loss of {micro} is {value}"
            if math.isnan(value) and micro.count > 1 and self.count is None:
                found += " (a mean over nothing, if it has no target that counts: let loss_fn return (sum, count))"
            raise NonFiniteLoss(found, f"stage {self.index}{self._progress()}")
        if self.count is None or not self.counts_add_up:
            loss = mean if micro.scale == 1.0 else mean * micro.scale
        return loss if self.scaling is None else loss * self.scaling.of(micro.update)

    def evaluate(self, inputs: Tree) -> Tree:
        """Evaluation-mode output at the newest weights; training state is left as it was."""
        modes = [(m, m.training) for m in self.module.modules()]
        self.module.eval()
        try:
            with torch.no_grad(), self.options.autocast():
                return self.module(inputs)
        finally:
            for module, training in modes:
                module.training = training
