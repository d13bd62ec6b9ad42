"""What evaluation measures beside the loss.

A metric is a function of the output and the target of a batch that returns a dict of sums: `{name: sum}` is divided by
the number of samples, `{name: (sum, count)}` by the counts. It is called where the last stage lives; the sums of all
batches are known on every rank. An object may have `summary(sums)`, which is given `{name: (sum, count)}` over all
batches and returns the numbers to report; `perplexity` takes the exponential of a mean that way.

`accuracy`, `top_k(5)` and `perplexity` are ready. `accuracy(shift=1)` is the same metric with other options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor

from .errors import ConfigError, ShapeMismatch

__all__ = [
    "DEFAULT",
    "Metric",
    "Sums",
    "accuracy",
    "checked",
    "fitted",
    "name_of",
    "perplexity",
    "summary_of",
    "sums_of",
    "top_k",
]

#: By name, what was added up and what it is divided by.
Sums: TypeAlias = Mapping[str, tuple[float, float]]
Metric: TypeAlias = Callable[[Any, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class _OfClasses:
    """Judges class scores by class numbers: of each sample, or of each position in it.

    **Arguments:**

    - `ignore`: positions with this class do not count; `None` counts all.
    - `shift`: the output at a position is about the target so many positions later, as in language models whose
      labels are their own input (`shift=1`). Classes come last then.
    - `axis`: of the classes in the output; found by the shapes unless given.
    """

    ignore: int | None = -100
    shift: int = 0
    axis: int | None = None

    def __call__(self, *batch: Any, **options: Any) -> Any:
        """The sums of a batch, given its output and target; without them the same metric with other options."""
        return self.measure(*self._lined_up(*batch)) if batch else self._with(**options)

    def _with(self, **options: Any) -> Self:
        try:
            return replace(self, **options)
        except TypeError:
            known = ", ".join(field for field in self.__dataclass_fields__)
            raise ConfigError(f"{self.name} has the options {known}; got {', '.join(options)}") from None

    @property
    def name(self) -> str:
        """What it is called in results."""
        raise NotImplementedError

    def measure(self, scores: Tensor, classes: Tensor) -> dict[str, tuple[float, float]]:
        """The sums over positions: `scores` are of shape `(positions, classes)`."""
        raise NotImplementedError

    def fits(self, output: Any, target: Any) -> bool:
        """Whether a batch is one of class scores `(N, C)` and class numbers `(N,)`, where nothing is left to guess."""
        return (
            isinstance(output, Tensor)
            and isinstance(target, Tensor)
            and not target.is_floating_point()
            and (output.dim(), target.dim()) == (2, 1)
            and len(output) == len(target)
            and output.shape[1] > 1
        )

    def _lined_up(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Scores and classes, one row per position that counts."""
        if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
            raise self._refused(output, target)
        if self.shift and (target.dim() < 2 or output.dim() != target.dim() + 1):
            raise self._refused(output, target, f"; shift={self.shift} needs sequences (N, T, C) and (N, T)")
        scores = output.movedim(self._class_axis(output, target), -1)
        if self.shift:
            scores, target = scores[:, : -self.shift], target[:, self.shift :]
        scores, classes = scores.reshape(-1, scores.shape[-1]), target.reshape(-1)
        if self.ignore is not None:
            counts = classes != self.ignore
            scores, classes = scores[counts], classes[counts]
        if classes.numel() and not 0 <= int(classes.min()) <= int(classes.max()) < scores.shape[-1]:
            raise ShapeMismatch(
                f"{self.name} got targets from {int(classes.min())} to {int(classes.max())} for {scores.shape[-1]} "
                f"classes; those to leave out are named by ignore= (now {self.ignore})"
            )
        return scores, classes

    def _class_axis(self, output: Tensor, target: Tensor) -> int:
        if self.axis is not None:
            axis = self.axis % output.dim()
            if target.shape != output.shape[:axis] + output.shape[axis + 1 :]:
                raise self._refused(output, target, f"; axis={self.axis}")
            return axis
        second = output.dim() > 1 and target.shape == output.shape[:1] + output.shape[2:]
        last = output.dim() > 1 and target.shape == output.shape[:-1]
        if second and last and output.dim() > 2 and not self.shift:
            raise self._refused(output, target, "; either axis may hold the classes: say axis=1 or axis=-1")
        if not second and not last:
            raise self._refused(output, target)
        return -1 if last else 1

    def _refused(self, output: Any, target: Any, why: str = "") -> ShapeMismatch:
        return ShapeMismatch(
            f"{self.name} compares class scores with class numbers, (N, C) with (N,) or (N, T, C) with (N, T), got "
            f"{_shown(output)} and {_shown(target)}{why}"
        )


@dataclass(frozen=True)
class _TopK(_OfClasses):
    """The share of positions whose class is among those with the `k` highest scores."""

    k: int = 1

    @property
    def name(self) -> str:
        return "accuracy" if self.k == 1 else f"top{self.k}"

    def measure(self, scores: Tensor, classes: Tensor) -> dict[str, tuple[float, float]]:
        best = scores.topk(min(self.k, scores.shape[-1]), dim=-1).indices if self.k > 1 else scores.argmax(-1, True)
        return {self.name: (float((best == classes[:, None]).sum()), float(len(classes)))}


@dataclass(frozen=True)
class _Perplexity(_OfClasses):
    """The exponential of the mean negative log-likelihood."""

    @property
    def name(self) -> str:
        return "perplexity"

    def measure(self, scores: Tensor, classes: Tensor) -> dict[str, tuple[float, float]]:
        surprise = torch.nn.functional.cross_entropy(scores.float(), classes, reduction="sum")
        return {self.name: (float(surprise), float(len(classes)))}

    def summary(self, sums: Sums) -> dict[str, float]:
        total, count = sums[self.name]
        mean = total / count if count else math.nan
        return {self.name: math.inf if mean >= 700 else math.exp(mean)}


#: The share of positions whose class has the highest score.
accuracy = _TopK()
#: The exponential of the mean negative log-likelihood of the targets.
perplexity = _Perplexity()


def top_k(k: int, **options: Any) -> Metric:
    """The share of positions whose class is among those with the `k` highest scores; reported as `top5` for 5.

    **Arguments:** `options`: those of `accuracy`: `ignore`, `shift`, `axis`.

    >>> import torch
    >>> top_k(2)(torch.tensor([[0.1, 0.5, 0.4], [0.7, 0.2, 0.1]]), torch.tensor([2, 2]))
    {'top2': (1.0, 2.0)}
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ConfigError(f"top_k makes a metric from a number of classes, as in top_k(5), got {type(k).__name__}")
    return _TopK(k=k)._with(**options)


class _WhereItFits:
    """Accuracy of classifiers; nothing where outputs or targets are anything else."""

    def __call__(self, output: Any, target: Any) -> Mapping[str, Any]:
        return dict(accuracy(output, target)) if accuracy.fits(output, target) else {}


#: What is measured if nobody says what.
DEFAULT: tuple[Metric, ...] = (_WhereItFits(),)


def checked(metrics: Any) -> tuple[Metric, ...]:
    """Metrics as they may be called; `None` is what is known to fit."""
    if metrics is None:
        return DEFAULT
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigError(f"metrics must be a list of functions (output, target) -> sums, got {_shown(metrics)}")
    for number, metric in enumerate(metrics):
        if not callable(metric) or metric is top_k:
            raise ConfigError(
                f"metrics[{number}] must be a function (output, target) -> sums, got {_shown(metric)}; ready ones are "
                "accuracy, top_k(5) and perplexity of unlatch.metrics"
            )
    return tuple(metrics)


def fitted(asked: Sequence[Metric], known: Sequence[Metric]) -> tuple[Metric, ...]:
    """What was asked for; ready metrics without options of their own look at the positions that `known` ones look at.

    >>> fitted([accuracy, top_k(5, shift=2)], [perplexity(shift=1)])
    (_TopK(ignore=-100, shift=1, axis=None, k=1), _TopK(ignore=-100, shift=2, axis=None, k=5))
    """
    model = next((metric for metric in known if isinstance(metric, _OfClasses)), None)
    if model is None:
        return tuple(asked)
    plain = [isinstance(metric, _OfClasses) and not metric.shift and metric.axis is None for metric in asked]
    where = {"shift": model.shift, "axis": model.axis}
    return tuple(metric(**where) if alone else metric for metric, alone in zip(asked, plain, strict=True))  # type: ignore[misc,call-arg]


def name_of(metric: Metric) -> str:
    """For messages."""
    if isinstance(metric, _OfClasses):
        return metric.name
    return getattr(metric, "__name__", None) or type(metric).__name__


def sums_of(metric: Metric, output: Any, target: Any, samples: float) -> dict[str, tuple[float, float]]:
    """What a metric says of a batch, each sum with what it is divided by.

    >>> sums_of(lambda output, target: {"error": 3.0, "hits": (2, 5)}, None, None, samples=4)
    {'error': (3.0, 4.0), 'hits': (2.0, 5.0)}
    """
    found = metric(output, target)
    if not isinstance(found, Mapping):
        raise ShapeMismatch(
            f"it returned {_shown(found)}: expected a dict of sums over the batch, {{name: sum}} or "
            "{name: (sum, count)}"
        )
    sums = {}
    for name, value in found.items():
        if not isinstance(name, str):
            raise ShapeMismatch(f"it returned a dict with the key {name!r:.60}: expected names")
        pair = value if isinstance(value, tuple | list) else (value, samples)
        if len(pair) != 2 or not all(_is_number(one) for one in pair):
            raise ShapeMismatch(f"{name!r} is {_shown(value)}: expected a number, or a pair of numbers (sum, count)")
        sums[name] = float(pair[0]), float(pair[1])
    return sums


def summary_of(metric: Metric, sums: Sums) -> dict[str, float]:
    """The numbers that a metric reports of the sums over all batches."""
    summarise = getattr(metric, "summary", None)
    if summarise is None:
        return {name: total / count if count else math.nan for name, (total, count) in sums.items()}
    found = summarise(sums)
    if not isinstance(found, Mapping) or not all(isinstance(k, str) and _is_number(v) for k, v in found.items()):
        raise ShapeMismatch(f"its summary returned {_shown(found)}: expected a dict of numbers by name")
    return {name: float(value) for name, value in found.items()}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list | dict) else repr(value)[:60]
