"""The method against its definition: a recursion over batches that has no queues, messages or clocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...methods import ClosedForm
from ...reference import SGD, recursion
from .finding import Finding, Inapplicable
from .trial import Batch, Trial, relative_difference

__all__ = ["definition"]


def definition(trial: Trial) -> Finding | str:
    """A delayed method under SGD follows its recursion, in double precision."""
    form = trial.method.closed_form(trial.config.run.stages)
    if isinstance(form, str):
        raise Inapplicable(form)
    sgd = _sgd(trial)
    batches = [(_double(x), _double(y)) for x, y in trial.batches()]
    model = trial.model(double=True)
    _refuse_frozen(model)
    try:
        with torch.no_grad():
            model(batches[0][0])
    except Exception as error:
        raise Inapplicable(f"the model does not run in double precision ({type(error).__name__}: {error})") from error
    truth = _truth(trial, batches, sgd, form)
    model = trial.model(double=True)
    plain: dict[str, Any] = {"precision": "fp32", "messages": "exact", "lr_scheduler": None, "clip_grad_norm": None}
    # The definition is computed on the CPU, where alone random numbers are the same.
    trial.train(batches, model=model, distributed=False, device="cpu", **plain)
    worst = max(
        relative_difference([p.detach() for p in stage.parameters()], list(truth[index].values()))
        for index, stage in enumerate(trial.stages(model))
        if truth[index]
    )
    said = f"{trial.count} batches with {trial.method.name} against its definition, a recursion, in float64"
    if not worst <= 1e-9:
        return Finding("definition", "differs", f"{said}: weights differ by {worst:.2e} (relative)")
    how = "bit for bit" if worst == 0.0 else f"up to rounding ({worst:.1e})"
    return f"{said}: the same weights {how}"


def _truth(trial: Trial, batches: list[Batch], sgd: SGD, form: ClosedForm) -> list[dict[str, Tensor]]:
    try:
        path = recursion(
            trial.stages(trial.model(double=True)),
            trial.micros(batches),
            trial.config.loss_fn(),
            sgd,
            form.forward_version,
            per_update=form.per_update,
            backward=form.backward,
            mixed=form.mixed,
            delays=form.delays,
            predict=form.predict,
            scale=form.scale,
            shrink=form.shrink,
            seed=trial.config.run.seed,
        )
    except (AttributeError, TypeError) as error:
        raise Inapplicable(f"the recursion knows stages with one tensor in and out only ({error})") from error
    return [versions[-1] for versions in path.weights]


def _sgd(trial: Trial) -> SGD:
    settings = trial.config.optimizer_factory()
    known = {"lr", "momentum", "nesterov", "weight_decay"}
    if settings.name != "SGD" or set(settings.options) - known:
        raise Inapplicable(f"the recursion is written out for plain SGD, and the optimizer is {settings.name}")
    return SGD(**settings.options)


def _refuse_frozen(model: nn.Module) -> None:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise Inapplicable(f"the recursion trains every parameter, and {frozen[0]!r} is frozen")


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t
