"""What delay costs, in words: a verdict and a cure from the limits of `unlatch.schedule.stability`.

The verdict goes by the limit of all stages together, counted by the total step of the optimizer. Its classes were set
on measured runs of one network and tried on those of another: `benchmarks/advice_check.py` says how often they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch.optim import SGD

from ..errors import ConfigError
from ..methods import Method
from ..rules.predict import predictor
from ..rules.updates import StagePlace
from ..runtime.updating import Optimizer
from ..schedule.stability import FEWEST_SAMPLES, Lag, Motion, chain_limit, is_modelled
from ..table import Table
from .motion import motion_of

__all__ = [
    "ELSEWHERE",
    "EXPECTED",
    "POINTS",
    "RELIABILITY",
    "Advice",
    "Cure",
    "Verdict",
    "advise",
    "earned",
    "lags_of",
    "margin_of",
    "no_theory",
    "places_of",
    "verdict_of",
]

Verdict = Literal["about bp", "some loss", "large loss"]


class _Bounds(NamedTuple):
    """Limits, in total steps, from which on a verdict holds."""

    about_bp: float
    some_loss: float


#: Where the size of gradients matters, and where it does not: steps of one size are taken along an average.
_SUMMING, _AVERAGING = _Bounds(2.25, 1.2), _Bounds(0.9, 0.75)

#: Points of accuracy below backpropagation at which "some loss" and "large loss" begin; means of three seeds scatter by
#: about one.
POINTS = (2.0, 6.0)
#: What a verdict stands for.
EXPECTED: dict[Verdict, str] = {
    "about bp": "about as good as bp (within 2 points in short runs)",
    "some loss": "some loss of accuracy is likely (2 to 6 points in short runs)",
    "large loss": "a large loss of accuracy is likely (6 points or more in short runs)",
}
#: How often verdicts were right for another network than that on which most of their bounds were set, by
#: `benchmarks/advice_check.py`, which says what was seen before.
RELIABILITY = "In a study on digits 44 of 55 verdicts and 17 of 19 warnings were right"
#: What "about as good as bp" was worth on another kind of network, by a study of which it was written down before;
#: `docs/result_tables/studies.py` checks it against `studies/results/shakespeare.jsonl`.
ELSEWHERE = 'on a character model fewer than half of "about as good" held: measure (docs/advice.md)'
#: How many times more micro-batches are tried where the batch size is not known.
_MOST_MORE = 8


@dataclass(frozen=True)
class Cure:
    """A setting that bears the delay better.

    **Arguments:**

    - `changes`: what to set, as Python writes it.
    - `call`: the method as it should be, to be pasted.
    - `limit`: a* that all stages together reach with it.
    - `verdict`: what is to be expected then.
    """

    changes: tuple[str, ...]
    call: str
    limit: float
    verdict: Verdict


@dataclass(frozen=True)
class Advice:
    """What the delays of a method cost.

    **Arguments:**

    - `lateness`: of every stage, in micro-batches.
    - `limits`: a* of every stage, if it were alone.
    - `limit`: a* of all stages together, by which `verdict` goes.
    - `microbatches`: per update.
    - `margin`: as `margin_of` has it; settings are ranked by it.
    - `warning`: if accuracy is likely to be lost.
    - `unknown`: why there is nothing to say about it, if so; then there are no limits and no verdict.
    """

    lateness: tuple[int, ...]
    microbatches: int
    limits: tuple[float, ...] = ()
    limit: float | None = None
    margin: float | None = None
    verdict: Verdict | None = None
    warning: str | None = None
    cure: Cure | None = None
    unknown: str | None = None

    def table(self) -> list[str]:
        """`figures`, then the warning, if there is one."""
        return self.figures() if self.warning is None else [*self.figures(), self.warning]

    def figures(self) -> list[str]:
        """Plain lines, one per stage, then all stages together; where that is good, how far to trust it.

        >>> import torch
        >>> from unlatch import methods
        >>> nesterov = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9, nesterov=True)
        >>> for line in advise(methods.get("pipedream", microbatches=1), 2, nesterov).figures(): print(line)
        stage  lateness  in updates     a*
            0         1         1.0  0.253
            1         0         0.0  1.357
        all stages together: a* = 0.770, about as good as bp (within 2 points in short runs)
        bounds are from digits; on a character model fewer than half of "about as good" held: measure (docs/advice.md)
        """
        if self.unknown is not None:
            return [f"no advice: {self.unknown}"]
        rows = [
            (str(stage), str(late), f"{late / self.microbatches:.1f}", f"{limit:.3f}")
            for stage, (late, limit) in enumerate(zip(self.lateness, self.limits, strict=True))
        ]
        lines = Table(("stage", "lateness", "in updates", "a*"), rows, left=()).lines()
        if self.verdict is not None:
            lines.append(f"all stages together: a* = {self.limit:.3f}, {EXPECTED[self.verdict]}")
        if self.verdict == "about bp" and any(self.lateness):
            lines.append(f"bounds are from digits; {ELSEWHERE}")
        return lines


def advise(
    method: Method,
    stages: int,
    optimizer: Optimizer | Mapping[int, Optimizer] | None,
    batch_size: int | None = None,
) -> Advice:
    """Judge a method under an optimizer, and name the cure where accuracy is likely to be lost.

    **Arguments:**

    - `method`: with every `"auto"` decided.
    - `optimizer`: of all stages, or of those that are known.
    - `batch_size`: total samples per update, to keep the advised micro-batches from becoming too small.

    >>> import torch
    >>> from unlatch import methods
    >>> heavy_ball = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    >>> advice = advise(methods.get("pipedream", microbatches=1), 4, heavy_ball)
    >>> advice.verdict, advice.cure.call
    ('large loss', 'unlatch.methods.PipeDream(microbatches=4)')
    """
    lateness = method.lateness(stages)
    unknown = no_theory(method, optimizer)
    if unknown is not None:
        return Advice(lateness, method.per_update, unknown=unknown)
    known = _by_stage(optimizer, len(lateness))
    motions = [_known(motion_of(one)) for one in known]
    lags = lags_of(method, lateness, motions)
    limit, verdict = chain_limit(lags), verdict_of(lags)
    warning, cure = None, None
    if verdict != "about bp":
        cure = _Search(method, stages, motions, known, batch_size).best()
        warning = _warning(max(lateness) / method.per_update, limit, verdict, cure)
    limits = tuple(chain_limit([lag]) for lag in lags)
    return Advice(lateness, method.per_update, limits, limit, margin_of(lags), verdict, warning, cure)


def no_theory(method: Method, optimizer: Optimizer | Mapping[int, Optimizer] | Motion | None) -> str | None:
    """Why no limit says anything about this method and optimizer; `None` if one does.

    >>> from unlatch import methods
    >>> no_theory(methods.get("dgl"), Motion())
    'dgl learns from local losses, about which a theory of delay has nothing to say'
    """
    if method.gradient == "local":
        return f"{method.name} learns from local losses, about which a theory of delay has nothing to say"
    chosen = method.rules().forward.prediction
    if chosen is not None and not (
        is_modelled(chosen.name) and chosen == predictor(chosen.name, alpha=chosen.regulator.alpha)
    ):
        return f"the recursion has no model of this predictor, {chosen!r}"
    if isinstance(optimizer, Motion):
        return None
    used = [optimizer] if isinstance(optimizer, Optimizer) else list((optimizer or {}).values())
    if not used:
        return "there is no optimizer"
    foreign = next((one for one in used if motion_of(one) is None), None)
    if foreign is not None:
        return f"there is no theory of delay here for {_named(foreign)}"
    return None


def _named(optimizer: Optimizer) -> str:
    """What it is called; where it is for its settings that there is no theory, with these."""
    if type(optimizer) is not SGD:
        return type(optimizer).__name__
    group = optimizer.param_groups[0]
    return f"SGD with momentum {group['momentum']:g} and dampening {group['dampening']:g}"


def lags_of(method: Method, lateness: Sequence[int], motions: Sequence[Motion]) -> list[Lag]:
    """Each stage (or layer, where tasks are placed) of a method as the recursion takes it.

    **Arguments:** `lateness`: of each, which may come from a plan; `motions`: of their optimizers.
    """
    rules, count, parts = method.rules(), len(lateness), method.per_update
    chosen = rules.forward.prediction
    return [
        Lag(
            late,
            motion,
            parts,
            None if chosen is None else chosen.name,
            1.0 if chosen is None else chosen.regulator.alpha,
            rules.update.scale(place),
            1.0 if motion.scale_free else (rules.gradient.border_factor or 1.0) ** (count - 1 - place.index),
        )
        for late, motion, place in zip(lateness, motions, places_of(method, lateness), strict=True)
    ]


def places_of(method: Method, lateness: Sequence[int]) -> list[StagePlace]:
    """Each stage as rules for updates know it. **Arguments:** as in `lags_of`."""
    return [StagePlace(index, len(lateness), -(-late // method.per_update)) for index, late in enumerate(lateness)]


def verdict_of(lags: Sequence[Lag]) -> Verdict:
    """What is to be expected of stages that are so late.

    >>> verdict_of([Lag(1), Lag(0)]), verdict_of([Lag(3), Lag(2), Lag(1), Lag(0)])
    ('some loss', 'large loss')
    """
    if not any(lag.lateness for lag in lags) or margin_of(lags) >= 1.0:
        return "about bp"
    bounds = _bounds(lags)
    return "some loss" if margin_of(lags) >= bounds.some_loss / bounds.about_bp else "large loss"


def earned(points: float) -> Verdict:
    """The verdict that a measured difference to backpropagation deserves, in points of accuracy.

    >>> [earned(points) for points in (0.5, -1.9, -2.0, -6.0)]
    ['about bp', 'about bp', 'some loss', 'large loss']
    """
    return "about bp" if points > -POINTS[0] else "some loss" if points > -POINTS[1] else "large loss"


def margin_of(lags: Sequence[Lag]) -> float:
    """The limit of all stages in total steps, over the bound from which on about nothing is lost.

    It orders settings by how much delay costs them, those of different optimizers too: the larger, the less.

    >>> margin_of([Lag(1), Lag(0)]) > margin_of([Lag(3), Lag(2), Lag(1), Lag(0)])
    True
    """
    return max(lag.motion.total for lag in lags) * chain_limit(lags) / _bounds(lags).about_bp


def _bounds(lags: Sequence[Lag]) -> _Bounds:
    return _AVERAGING if all(lag.motion.scale_free for lag in lags) else _SUMMING


def _by_stage(optimizer: Optimizer | Mapping[int, Optimizer] | None, count: int) -> list[Optimizer]:
    """One optimizer for each stage; where a stage's own is not known, that of the nearest."""
    if isinstance(optimizer, Optimizer):
        return [optimizer] * count
    known = optimizer or {}
    return [known[min(known, key=lambda other: abs(other - stage))] for stage in range(count)]


def _known(motion: Motion | None) -> Motion:
    assert motion is not None, "whoever asks has asked `no_theory` before"
    return motion


@dataclass(frozen=True)
class _Search:
    """Looks for the smallest change after which about nothing is lost."""

    method: Method
    stages: int
    motions: list[Motion]
    optimizers: list[Optimizer]
    batch_size: int | None

    def best(self) -> Cure | None:
        """The first candidate that is about as good as bp, else the one that bears most, if that is more than now."""
        now = self._borne(self.method, self.motions)
        found: tuple[float, Cure] | None = None
        for method, motions in self._candidates():
            borne = self._borne(method, motions)
            if borne > max(now, found[0] if found is not None else 0.0):
                found = borne, self._cure(method, motions)
                if found[1].verdict == "about bp":
                    break
        return None if found is None else found[1]

    def _candidates(self) -> Iterator[tuple[Method, list[Motion]]]:
        """From what helps most surely to what may: micro-batches, Nesterov momentum, prediction."""
        yield from ((method, self.motions) for method in self._split())
        nesterov = [replace(one, nesterov=True) for one in self.motions]
        if all(one.may_look_ahead for one in self.motions) and nesterov != self.motions:
            yield from ((method, nesterov) for method in [self.method, *self._split()])
        yield from ((method, self.motions) for one in [self.method, *self._split()] for method in self._predicting(one))

    def _split(self) -> Iterator[Method]:
        parts = self.method.per_batch
        most = parts * _MOST_MORE if self.batch_size is None else self.batch_size // FEWEST_SAMPLES
        while (parts := 2 * parts) <= most:
            yield replace(self.method, microbatches=parts)

    def _predicting(self, method: Method) -> Iterator[Method]:
        """The method with prediction, unless it, or the optimizer, refuses that, or it predicts already.

        Not under Nesterov momentum: no study shows that it helps there, and on two networks it cost accuracy.
        """
        if any(one.nesterov for one in self.motions):
            return
        if method.rules().forward.prediction is not None or "predict" not in method.arguments:
            return
        try:
            for one in self.optimizers:
                predictor(_PREDICTOR).needs_with(one)
            yield replace(method, predict=_PREDICTOR)  # type: ignore[call-arg]
        except ConfigError:
            return

    def _lags(self, method: Method, motions: list[Motion]) -> list[Lag]:
        return lags_of(method, method.lateness(self.stages), motions)

    def _borne(self, method: Method, motions: list[Motion]) -> float:
        return chain_limit(self._lags(method, motions))

    def _cure(self, method: Method, motions: list[Motion]) -> Cure:
        lags = self._lags(method, motions)
        before = self.method.arguments
        changes = [f"{name}={value!r}" for name, value in method.arguments.items() if value != before[name]]
        if motions != self.motions:
            changes.append("nesterov=True")
        return Cure(tuple(changes), method.call, chain_limit(lags), verdict_of(lags))


#: The one whose effect the study has measured.
_PREDICTOR = "geometric"


def _warning(delay: float, limit: float, verdict: Verdict, cure: Cure | None) -> str:
    late = f"{delay:.3g} update{'' if delay == 1 else 's'} late"
    text = f"gradients are up to {late}, a* = {limit:.3f} of all stages together: {EXPECTED[verdict]}."
    if cure is None:
        return f"{text} Use fewer stages, a method with less delay, or larger batches split into more micro-batches."
    optimizer = " and nesterov=True in the optimizer" if "nesterov=True" in cure.changes else ""
    good = cure.verdict == "about bp"
    reach = EXPECTED["about bp"] if good else "better, though not as good as bp; fewer stages help more"
    trust = f"{RELIABILITY}; {ELSEWHERE}" if good else RELIABILITY
    return f"{text} Use {cure.call}{optimizer}: a* = {cure.limit:.3f}, {reach}. ({trust}.)"
