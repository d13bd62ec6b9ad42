"""The update of one stage: average, clip, step, count. Whatever needs to know of past weights is told here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..rules.average import UpdateAverage
from ..rules.bundle import Rules
from ..rules.history import History

__all__ = ["Optimizer", "Updater"]

Optimizer = torch.optim.Optimizer


class Updater:
    """An optimizer with its learning-rate schedule, the stage's own step size, and the memory predictors need.

    **Arguments:**

    - `params`: the stage's trained parameters; may be none.
    - `delay`: most updates that can pass between a forward and its backward at this stage.
    - `factor`: of this stage on every learning rate.
    - `lr_scale`: of the n-th update on every learning rate.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        rules: Rules,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        lr_scheduler: Callable[[Optimizer], Any] | None,
        *,
        delay: int,
        factor: float = 1.0,
        lr_scale: Callable[[int], float] | None = None,
        clip_grad_norm: float | None = None,
    ) -> None:
        self.params = list(params)
        self.rules = rules
        self.optimizer = optimizer(self.params) if self.params else None
        self.scheduler = lr_scheduler(self.optimizer) if lr_scheduler and self.optimizer else None
        self.factor = factor
        self.version = 0
        self.previous: list[Tensor] = []
        self._lr_scale = lr_scale
        self._clip = clip_grad_norm
        self._delay = delay
        self._predicted: list[Tensor] | None = None
        self._past: list[Tensor] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop what is known of earlier weights, so that a continued and a resumed run go on alike."""
        predictor = self.rules.predictor
        self.history = History(self.params)
        if predictor is not None and self.optimizer is not None:
            self.history = predictor.history(self.params, self.optimizer)
        self.average = UpdateAverage(self._delay if self.rules.weights == "average" else 0)
        self.previous = []

    def step(self, batches: int, previous: list[Tensor]) -> None:
        """Apply the gradients of `batches` batches and clear them; `previous` are the weights to remember."""
        self.previous = previous
        if self.optimizer is not None:
            grads = [p.grad for p in self.params if p.grad is not None]
            if batches > 1 and self.rules.average and grads:
                torch._foreach_div_(grads, float(batches))
            if self._clip is not None:
                nn.utils.clip_grad_norm_(self.params, self._clip)
            self.history.before_step(self.params)
            self.average.before_step(self.params)
            with self._scaled_lr(self.optimizer):
                self.optimizer.step()
            self.average.after_step(self.params)
            self.history.after_step(self.params)
            self.optimizer.zero_grad(set_to_none=True)
            if self.scheduler is not None:
                self.scheduler.step()
        self.version += 1

    @contextmanager
    def unscheduled(self) -> Iterator[None]:
        """Steps inside leave the learning-rate schedule where it is: together with the next they are one update."""
        scheduler, self.scheduler = self.scheduler, None
        try:
            yield
        finally:
            self.scheduler = scheduler

    def predicted(self, steps: int, *, reuse: bool) -> list[Tensor] | None:
        """The weights `steps` updates ahead, or `None` if nobody predicts; with `reuse`, in the buffers used before."""
        predictor = self.rules.predictor
        if predictor is None or steps <= 0 or self.optimizer is None:
            return None
        out = self._predicted if reuse else None
        values = predictor.predict(self.params, self.optimizer, steps, self.history, out=out, lr_scale=self.lr_factor())
        if reuse:
            self._predicted = values
        return values

    def past(self, updates: int) -> list[Tensor]:
        """The weights `updates` updates ago, reconstructed from the moving average."""
        if updates <= 0:
            return [p.data for p in self.params]
        values = self.average.past(self.params, updates, out=self._past)
        if values and values[0] is not self.params[0]:
            self._past = values
        return [v.data for v in values]

    def lr_factor(self) -> float:
        """What multiplies the user's learning rate at the next update."""
        return self.factor * (self._lr_scale(self.version) if self._lr_scale else 1.0)

    @contextmanager
    def _scaled_lr(self, optimizer: Optimizer) -> Iterator[None]:
        """Multiply the learning rate for one step only, so that any scheduler keeps working on the user's numbers."""
        factor = self.lr_factor()
        if factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
