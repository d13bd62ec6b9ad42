"""What delay costs, in words: verdicts and cures from the limits of `unlatch.schedule.stability`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..methods import Method
from ..runtime.updating import Optimizer
from ..schedule.stability import (
    ABOUT_BP,
    SOME_LOSS,
    auto_microbatches,
    is_modelled,
    predicts,
    stability_limit,
    wants_prediction,
)
from ..table import Table

__all__ = ["Advice", "Cure", "Verdict", "advise", "advise_method"]

Verdict = Literal["about bp", "some loss", "large loss"]


def advise_method(
    method: Method, stages: int, optimizer: Optimizer | None, batch_size: int | None = None
) -> Advice | None:
    """What the linear recursion says about this method under this optimizer.

    **Returns:** `None` where it has nothing to say: no optimizer, one without momentum it knows of, or a predictor of
    the user's own.

    >>> import torch
    >>> from unlatch import methods
    >>> heavy_ball = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    >>> advise_method(methods.FDG(microbatches=1), 4, heavy_ball).warning is None
    False
    """
    if optimizer is None:
        return None
    group = optimizer.param_groups[0]
    adaptive = "betas" in group
    momentum = group["betas"][0] if adaptive else group.get("momentum")
    if momentum is None:
        return None
    chosen = method.rules().forward.prediction
    if chosen is not None and not is_modelled(chosen.name):
        return None
    return advise(
        method.lateness(stages),
        momentum=float(momentum),
        nesterov=bool(group.get("nesterov", False)),
        predictor=None if chosen is None else chosen.name,
        alpha=1.0 if chosen is None else chosen.regulator.alpha,
        microbatches=method.per_update,
        batch_size=batch_size,
        nesterov_available=not adaptive,
    )


@dataclass(frozen=True)
class Cure:
    """A setting that bears the delay better, and the limit it reaches at the oldest stage."""

    microbatches: int
    nesterov: bool
    predictor: str | None
    limit: float
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """What the delay of every stage costs. `warning` is None when nothing is expected to be lost."""

    lateness: tuple[int, ...]
    limits: tuple[float, ...]
    verdicts: tuple[Verdict, ...]
    microbatches: int
    warning: str | None
    cure: Cure | None

    def table(self) -> list[str]:
        """Plain lines, one per stage, the warning last.

        >>> for line in advise([1, 0], momentum=0.9, nesterov=True).table(): print(line)
        stage  lateness  in updates     a*  verdict
            0         1         1.0  0.253  about bp
            1         0         0.0  1.357  about bp
        """
        judged = enumerate(zip(self.lateness, self.limits, self.verdicts, strict=True))
        rows = [
            (str(stage), str(late), f"{late / self.microbatches:.1f}", f"{limit:.3f}", verdict)
            for stage, (late, limit, verdict) in judged
        ]
        lines = Table(("stage", "lateness", "in updates", "a*", "verdict"), rows, left=(4,)).lines()
        return lines if self.warning is None else [*lines, self.warning]


def advise(
    lateness: Sequence[int],
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    predictor: str | None = None,
    alpha: float = 1.0,
    microbatches: int = 1,
    batch_size: int | None = None,
    nesterov_available: bool = True,
) -> Advice:
    """Judge a setting by the stability limit of each stage and name the cure where accuracy is likely to be lost.

    **Arguments:**

    - `lateness`: per stage, in micro-batches; see `stability_limit` for the other settings.
    - `batch_size`: total samples per update, to keep the advised micro-batches from becoming too small.
    - `nesterov_available`: False for optimizers without that option (Adam).

    >>> advice = advise([5, 3, 1, 0], momentum=0.9)
    >>> advice.verdicts[0], advice.cure.changes
    ('large loss', ('microbatches=4', 'nesterov=True'))
    """
    limits = tuple(
        stability_limit(
            late, momentum=momentum, nesterov=nesterov, predictor=predictor, alpha=alpha, microbatches=microbatches
        )
        for late in lateness
    )
    verdicts = tuple(_verdict(late, limit) for late, limit in zip(lateness, limits, strict=True))
    warning, cure = None, None
    worst = min(range(len(limits)), key=lambda stage: (verdicts[stage] == "about bp", limits[stage]), default=None)
    if worst is not None and verdicts[worst] != "about bp":
        current = Cure(microbatches, nesterov, predictor, limits[worst], ())
        cure = _cure(lateness[worst], current, momentum, alpha, batch_size, nesterov_available and momentum > 0.0)
        warning = _warning(worst, lateness[worst] / microbatches, limits[worst], verdicts[worst], cure)
    return Advice(tuple(lateness), limits, verdicts, microbatches, warning, cure)


def _verdict(lateness: int, limit: float) -> Verdict:
    if lateness == 0 or limit >= ABOUT_BP:
        return "about bp"
    return "some loss" if limit >= SOME_LOSS else "large loss"


def _cure(
    lateness: int, current: Cure, momentum: float, alpha: float, batch_size: int | None, may_nesterov: bool
) -> Cure | None:
    """The smallest step up the ladder micro-batches (by the rule), prediction, more micro-batches that reaches BP."""
    nesterov = current.nesterov or may_nesterov
    rule = max(current.microbatches, auto_microbatches(lateness, batch_size))
    ample = max(current.microbatches, auto_microbatches(2 * lateness - 1, batch_size))
    predicting = current.predictor if predicts(current.predictor) else "geometric"
    ladder = [
        (rule, predicting if wants_prediction(lateness, rule) else current.predictor),
        (rule, predicting),
        (ample, predicting if wants_prediction(lateness, ample) else current.predictor),
        (ample, predicting),
    ]
    best: Cure | None = None
    for count, name in ladder:
        limit = stability_limit(
            lateness, momentum=momentum, nesterov=nesterov, predictor=name, alpha=alpha, microbatches=count
        )
        if best is None or limit > best.limit:
            best = Cure(count, nesterov, name, limit, _changes(current, count, nesterov, name))
        if best.limit >= ABOUT_BP:
            break
    return best if best is not None and best.limit > current.limit and best.changes else None


def _changes(current: Cure, microbatches: int, nesterov: bool, predictor: str | None) -> tuple[str, ...]:
    wanted = (
        (microbatches != current.microbatches, f"microbatches={microbatches}"),
        (nesterov != current.nesterov, "nesterov=True"),
        (predictor != current.predictor, f"predict={predictor!r}"),
    )
    return tuple(text for differs, text in wanted if differs)


def _warning(stage: int, delay: float, limit: float, verdict: Verdict, cure: Cure | None) -> str:
    expected = (
        "some loss of accuracy is likely (1 to 4 points in short runs)"
        if verdict == "some loss"
        else "a large loss of accuracy is likely (4 points or more in short runs)"
    )
    late = f"{delay:.3g} update{'' if delay == 1 else 's'} late"
    text = f"stage {stage} is {late}, a* = {limit:.3f}: {expected}. A lower learning rate does not help."
    if cure is None:
        return f"{text} Use fewer stages, a method with less delay, or larger batches split into more micro-batches."
    reach = (
        "about as good as bp" if cure.limit >= ABOUT_BP else "better, though not as good as bp; fewer stages help more"
    )
    return f"{text} Set {', '.join(cure.changes)}: a* = {cure.limit:.3f}, {reach}."
