"""The method against its definition: a recursion over batches that has no queues, messages or clocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...reference import SGD, recursion
from ...rules.predict import predictor
from ...rules.updates import StagePlace
from .finding import Finding, Inapplicable
from .trial import Batch, Trial, relative_difference

__all__ = ["definition"]

_PREDICTORS = ("none", "difference", "linear", "geometric", "constant-gradient")


def definition(trial: Trial) -> Finding | str:
    """A delayed method under SGD follows its recursion, in double precision."""
    sgd, predict = _sgd(trial), _predictor(trial)
    batches = [(_double(x), _double(y)) for x, y in trial.batches()]
    model = trial.model(double=True)
    _refuse_frozen(model)
    try:
        with torch.no_grad():
            model(batches[0][0])
    except Exception as error:
        raise Inapplicable(f"the model does not run in double precision ({type(error).__name__}: {error})") from error
    truth = _truth(trial, batches, sgd, predict)
    model = trial.model(double=True)
    trial.train(batches, model=model, precision="fp32", lr_scheduler=None, clip_grad_norm=None, distributed=False)
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


def _truth(trial: Trial, batches: list[Batch], sgd: SGD, predict: str) -> list[dict[str, Tensor]]:
    method, per_update = trial.method, trial.parts * trial.method.accumulate
    stages = trial.stages(trial.model(double=True))
    gaps, rules = method.gaps(len(stages)), method.rules()
    delays = [math.ceil(updates) for updates in method.staleness(len(stages))]
    places = [StagePlace(stage, len(stages), delay) for stage, delay in enumerate(delays)]
    factor = rules.gradient.border_factor
    if factor is None:
        raise Inapplicable("the recursion knows gradients that are multiplied by a constant at every border, no others")

    def forward_version(stage: int, micro: int) -> int:
        return rules.forward.version(max(0, micro - gaps[stage]) // per_update, micro // per_update)

    try:
        path = recursion(
            stages,
            trial.micros(batches),
            trial.config.loss_fn(),
            sgd,
            forward_version,
            per_update=per_update,
            backward=rules.backward.taken_at,
            mixed=rules.mixes,
            delays=delays,
            predict=predict,
            scale=lambda stage, update: (
                rules.update.scale(places[stage]) * rules.update.scale_at(places[stage], update)
            ),
            beta=factor,
            seed=trial.config.run.seed,
        )
    except (AttributeError, TypeError) as error:
        raise Inapplicable(f"the recursion knows stages with one tensor in and out only ({error})") from error
    return [versions[-1] for versions in path.weights]


def _sgd(trial: Trial) -> SGD:
    method = trial.method
    if method.schedule(trial.config.run.stages).flushes:
        raise Inapplicable(f"{method.name} has no delay")
    settings = trial.config.optimizer_factory()
    known = {"lr", "momentum", "nesterov", "weight_decay"}
    if settings.name != "SGD" or set(settings.options) - known:
        raise Inapplicable(f"the recursion is written out for plain SGD, and the optimizer is {settings.name}")
    if not method.rules().update.averages:
        raise Inapplicable("gradients of several batches are added up here, and the recursion averages them")
    return SGD(**settings.options)


def _predictor(trial: Trial) -> str:
    rules = trial.method.rules()
    chosen = rules.forward.prediction
    if rules.activation.inverts:
        raise Inapplicable("reversible stages reconstruct their inputs, which is approximate by design")
    if chosen is None:
        return "none"
    if chosen.name not in _PREDICTORS or chosen != predictor(chosen.name):
        raise Inapplicable(f"the recursion has no predictor {chosen!r}")
    return chosen.name


def _refuse_frozen(model: nn.Module) -> None:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise Inapplicable(f"the recursion trains every parameter, and {frozen[0]!r} is frozen")


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t
