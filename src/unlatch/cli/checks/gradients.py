"""Gradients against backpropagation: with weights that stand still, and for methods that promise exactness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.randomness import replayable
from .finding import Finding, Inapplicable
from .trial import Batch, Trial, relative_difference

__all__ = ["exact_method", "standing_still"]

Gradients = list[Tensor]


class _Tap(torch.optim.SGD):
    """An optimizer that writes gradients down and leaves weights alone (learning rate 0)."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.0, momentum=0.9, nesterov=True)
        self.seen: list[Gradients] = []

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take note of the gradients of every parameter."""
        params = self.param_groups[0]["params"]
        self.seen.append([torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in params])
        result: float | None = super().step(closure)
        return result


def standing_still(trial: Trial) -> Finding | str:
    """With a learning rate of 0 every stage's gradient is backpropagation's, however late it comes."""
    if (reason := trial.method.inexact_at_rest) is not None:
        raise Inapplicable(reason)
    batches = trial.batches()
    found = _tapped(trial, batches)
    model = trial.model()
    true = _true_gradients(trial, model, batches)
    worst = max(
        relative_difference(a, b)
        for ours, theirs in zip(found, true, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    said = f"{len(true[0])} updates, {len(true)} stage(s), weights standing still: gradients against backpropagation"
    # A reversible stage computes its input back, which rounds.
    limit = 1e-2 if trial.method.inverts else 1e-4
    return _judge("zero learning rate", said, worst, limit)


def exact_method(trial: Trial) -> Finding | str:
    """A method with a flush gives the gradient of the whole batch, although it works on micro-batches."""
    if (reason := trial.method.inexact_at_rest) is not None:
        raise Inapplicable(reason)
    if trial.method.gradient != "exact":
        raise Inapplicable(f"{trial.method.name} applies late gradients by design; the other checks say how late")
    if trial.method.per_batch > 1 and (reason := _sees_the_batch(trial.model())):
        raise Inapplicable(f"{reason}, so micro-batches rightly give another gradient than the whole batch")
    batches = [(_double(x), _double(y)) for x, y in trial.batches()]
    model = trial.model(double=True)
    try:
        found = _tapped(trial, batches, model=model, precision="fp32", device="cpu")
    except Exception as error:
        raise Inapplicable(f"the model does not run in double precision ({type(error).__name__}: {error})") from error
    worst = 0.0
    for update, (x, y) in enumerate(batches):
        model.zero_grad()
        with replayable(trial.config.run.seed, 0, update):
            trial.config.loss_fn()(model(x), y).backward()
        for index, stage in enumerate(trial.stages(model)):
            true = [p.grad if p.grad is not None else torch.zeros_like(p) for p in _trained(stage)]
            worst = max(worst, relative_difference(found[index][update], true))
    method = trial.method
    said = f"{method.name} on {method.per_batch} micro-batch(es) against backpropagation on the whole batch, in float64"
    return _judge("exact gradient", said, worst, 1e-10)


def _judge(check: str, said: str, worst: float, limit: float) -> Finding | str:
    if not worst <= limit:
        return Finding(check, "differs", f"{said}: relative difference {worst:.2e}, more than rounding explains")
    return f"{said}: {'the same, bit for bit' if worst == 0.0 else f'the same up to rounding ({worst:.1e})'}"


def _tapped(trial: Trial, batches: Sequence[Batch], **changes: Any) -> list[list[Gradients]]:
    """The gradients of every update, by stage."""
    taps: list[_Tap | None] = []

    def tap(params: list[nn.Parameter]) -> _Tap:
        taps.append(_Tap(params))
        return taps[-1]  # type: ignore[return-value]

    plain: dict[str, Any] = {"lr_scheduler": None, "clip_grad_norm": None, "messages": "exact", "distributed": False}
    trial.train(batches, optimizer=tap, **plain, **changes)
    model = changes.get("model") or trial.model()
    waiting = iter(taps)
    # A stage without parameters has no optimizer.
    return [next(waiting).seen if _trained(stage) else [[]] * len(taps[0].seen) for stage in trial.stages(model)]  # type: ignore[union-attr]


def _true_gradients(trial: Trial, model: nn.Module, batches: Sequence[Batch]) -> list[list[Gradients]]:
    """Plain backpropagation through the whole chain, micro-batch by micro-batch, with the run's random numbers."""
    stages, loss_fn, config = trial.stages(model), trial.config.loss_fn(), trial.config
    device = trial.device
    device.moved(model)
    found: list[list[Gradients]] = [[] for _ in stages]
    per_update = trial.method.per_update
    for number, (x, y) in enumerate(device.here(trial.micros(batches))):
        for index, stage in enumerate(stages):
            with replayable(config.run.seed, index, number, device), device.autocast(config.run.precision):
                x = stage(x)
                if index == len(stages) - 1:
                    loss = loss_fn(x, y)
        (loss / trial.method.per_batch if trial.method.per_batch > 1 else loss).backward()
        if (number + 1) % per_update == 0:
            for index, stage in enumerate(stages):
                found[index].append([_averaged(p.grad, p, trial.method.accumulate) for p in _trained(stage)])
            model.zero_grad()
    return found


def _averaged(gradient: Tensor | None, p: Tensor, batches: int) -> Tensor:
    return torch.zeros_like(p) if gradient is None else gradient.detach().clone() / batches


def _trained(stage: nn.Module) -> list[nn.Parameter]:
    return [p for p in stage.parameters() if p.requires_grad]


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _sees_the_batch(model: nn.Module) -> str | None:
    """Why the output of a sample depends on its batch, if it does."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "batch norm takes its statistics from the batch it sees"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout draws another mask for each micro-batch"
    return None
