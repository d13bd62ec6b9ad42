"""Weights of the future: run a forward at the weights that its backward is going to meet.

Each predictor assumes something about the coming updates and is exact when that holds:

| name | assumption | SGD with momentum mu, buffer v |
|---|---|---|
| `none` | weights stand still | W |
| `difference` | straight-line motion, any optimizer | W + R(s) (W_n - W_{n-1}) |
| `linear` | constant velocity | W - lr R(s) v |
| `geometric` | the last step fades by mu from update to update | W + alpha (mu + ... + mu^s) (W_n - W_{n-1}) |
| `coasting` | no new gradients | W - lr alpha (mu + ... + mu^s) v, under Nesterov mu times that |
| `constant-gradient` | the last gradient returns, with weight decay | s updates with it |

With heavy-ball momentum `geometric` and `coasting` are the same. Under Nesterov the last step holds the newest gradient
once more than the buffer does; extending that whole step gives the larger stability limit (see
`unlatch.schedule.stability`) and costs one more copy of the weights. For Adam and AdamW both mean coasting: moments
fade, bias correction and decoupled decay go on. Weight decay that an optimizer adds to the gradient counts as gradient.

All but `difference` go at the learning rates that the coming updates will have: the sums above are then over lr_i or
mu^i lr_i, and a measured step is taken as what it would have been at those rates.

A predictor works from the current weights and never writes to them. What it must know of the last update beyond the
optimizer's own state is kept by a `History`. How far it goes is up to a `Regulator` R(s) = alpha * rho(s), which takes
the place of the raw number of steps s: far predictions overshoot, because the weights will have turned meanwhile; a
regulator that saturates holds them back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..errors import CheckpointMismatch, ConfigError
from ..schedule.stability import geometric_factor
from . import closed_forms as forms
from .closed_forms import Bucket, require_closed_form

__all__ = [
    "ConstantGradient",
    "Difference",
    "Geometric",
    "History",
    "Linear",
    "NoPrediction",
    "Predictor",
    "Regulator",
    "Rho",
    "predictor",
]

Rho = Literal["steps", "geometric", "capped", "power"]


@dataclass(frozen=True)
class Regulator:
    """R(s) = alpha * rho(s), with R(0) = 0.

    **Arguments:**

    - `alpha`: factor on every displacement.
    - `rho`: `"steps"` s; `"geometric"` mu + mu^2 + ... + mu^s with the optimizer's momentum mu; `"capped"` min(s, cap);
      `"power"` s^power.
    - `cap`: the largest step count, for `"capped"` only.
    - `power`: the exponent, for `"power"` only.

    >>> Regulator(alpha=0.5)(4), Regulator(rho="capped", cap=3)(5), Regulator(rho="power", power=0.5)(9)
    (2.0, 3.0, 3.0)
    >>> round(Regulator(rho="geometric")(3, momentum=0.9), 3)
    2.439
    """

    alpha: float = 1.0
    rho: Rho = "steps"
    cap: float | None = None
    power: float | None = None

    def __post_init__(self) -> None:
        if self.rho not in get_args(Rho):
            raise ConfigError(f"unknown delay regulator rho={self.rho!r}: expected one of {', '.join(get_args(Rho))}")
        if not (math.isfinite(self.alpha) and self.alpha >= 0):
            raise ConfigError(f"delay regulator alpha={self.alpha}: expected a finite number >= 0")
        for name, rho in (("cap", "capped"), ("power", "power")):
            value = getattr(self, name)
            if (value is not None) != (self.rho == rho):
                raise ConfigError(
                    f"delay regulator rho={self.rho!r}, {name}={value}: {name} goes with rho={rho!r} and only there"
                )
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"delay regulator {name}={value}: expected a finite number > 0")

    def __call__(self, steps: int, momentum: float = 0.0) -> float:
        """The effective number of steps; `momentum` matters to `"geometric"` alone."""
        if steps <= 0:
            return 0.0
        if self.rho == "geometric":
            return self.alpha * geometric_factor(momentum, steps)
        if self.cap is not None:
            return self.alpha * min(float(steps), self.cap)
        return self.alpha * math.pow(steps, 1.0 if self.power is None else self.power)

    def fade(self, momentum: float) -> float:
        """How much of a step's share in R(s) the next one has."""
        return momentum if self.rho == "geometric" else 1.0


_KINDS = frozenset({"update", "gradient"})
# An update is known by the weights before it.
_SAVED_AS = {"update": "previous", "gradient": "gradient"}


class History:
    """The last applied update and the last gradient, each kept only if asked for, in buffers that are reused.

    Of an update the weights before it are kept: whoever extends it needs nothing else, and the difference to the
    weights after it is not computed before somebody asks for it.

    Call `before_step` just before `optimizer.step()`, with the gradients in their final form, and `after_step` just
    after it, before they are cleared.

    **Arguments:**

    - `params`: the parameters of the stage, always in this order.
    - `needs`: of `"update"` (the decrease `W_{n-1} - W_n`) and `"gradient"`.
    - `optimizer`: whose learning rates are noted with an update, so that it can be translated to other ones; without
      it they count as unchanged.

    >>> w = torch.nn.Parameter(torch.ones(2))
    >>> history = History([w], {"update"})
    >>> history.before_step([w])
    >>> w.data -= 0.25
    >>> history.after_step([w])
    >>> history.update
    [tensor([0.2500, 0.2500])]
    """

    def __init__(self, params: Sequence[Tensor], needs: Iterable[str] = (), optimizer: Optimizer | None = None) -> None:
        self.needs = frozenset(needs)
        if not self.needs <= _KINDS:
            raise ConfigError(f"a history cannot keep {sorted(self.needs - _KINDS)}: expected some of {sorted(_KINDS)}")
        self._count = len(params)
        self._optimizer = optimizer if "update" in self.needs else None
        self._rates: list[float] = []
        self._previous: list[Tensor] = []
        self._update: list[Tensor] = []
        self._params = params
        self._gradient: list[Tensor] = []
        self._moved = [False] * self._count
        self._complete = False

    @property
    def previous(self) -> list[Tensor] | None:
        """Each parameter before the last update; None before the first one."""
        return self._previous if self._complete and "update" in self.needs else None

    @property
    @torch.no_grad()
    def update(self) -> list[Tensor] | None:
        """The last applied decrease of each parameter; None before the first update."""
        previous = self.previous
        if previous:
            self._update = self._update or _empty_like(previous)
            torch._foreach_copy_(self._update, previous)
            torch._foreach_sub_(self._update, list(self._params))
        return None if previous is None else self._update

    def rate(self, position: int) -> float | None:
        """The learning rate at which a parameter was last updated, if known."""
        return self._rates[position] if self._rates else None

    @property
    def gradient(self) -> list[Tensor | None] | None:
        """The gradient of the last update, None for parameters that had none; None before the first update."""
        if not (self._complete and "gradient" in self.needs):
            return None
        return [g if moved else None for g, moved in zip(self._gradient, self._moved, strict=True)]

    @torch.no_grad()
    def before_step(self, params: Sequence[Tensor]) -> None:
        """Record weights and gradients as they enter the update."""
        self._complete = False
        if "update" in self.needs and params:
            self._previous = self._previous or _empty_like(params)
            torch._foreach_copy_(self._previous, list(params))
        if self._optimizer is not None:
            rates = {id(p): float(group["lr"]) for group in self._optimizer.param_groups for p in group["params"]}
            self._rates = [rates.get(id(p), 0.0) for p in params]
        if "gradient" in self.needs:
            self._gradient = self._gradient or _empty_like(params)
            pairs = [(b, p.grad) for b, p in zip(self._gradient, params, strict=True) if p.grad is not None]
            self._moved = [p.grad is not None for p in params]
            if pairs:
                torch._foreach_copy_([b for b, _ in pairs], [g for _, g in pairs])

    def after_step(self, params: Sequence[Tensor]) -> None:
        """The update was applied."""
        self._params = params
        self._complete = True

    def state_dict(self) -> dict[str, list[Tensor]]:
        """What an exact resume must restore; empty before the first update and where nothing is kept."""
        if not self._complete:
            return {}
        kept = {"update": self._previous, "gradient": self._gradient}
        state = {_SAVED_AS[kind]: [t.clone() for t in kept[kind]] for kind in sorted(self.needs)}
        if "gradient" in state:
            state["moved"] = [torch.tensor(moved) for moved in self._moved]
        if self._rates:
            state["rates"] = [torch.tensor(rate, dtype=torch.float64) for rate in self._rates]
        return state

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Take over what another history's `state_dict` returned."""
        for kind in self.needs if state else ():
            found = len(state.get(_SAVED_AS[kind], ()))
            if found != self._count:
                raise CheckpointMismatch(
                    f"history of the last {kind}: expected {self._count} tensors, got {found}; "
                    "the checkpoint was written with another split or predictor, resume without loop state"
                )
        self._previous = [t.clone() for t in state.get("previous", ())]
        self._gradient = [t.clone() for t in state.get("gradient", ())]
        self._moved = [bool(t) for t in state.get("moved", [torch.tensor(False)] * self._count)]
        self._rates = [float(t) for t in state.get("rates", ())]
        self._complete = bool(state)


def _empty_like(params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(p, requires_grad=False) for p in params]


_NOTHING: frozenset[str] = frozenset()
_UPDATE = frozenset({"update"})


@dataclass(frozen=True)
class Predictor(ABC):
    """An assumption about the coming updates. `needs` is what a `History` must keep for it, whatever the optimizer."""

    kind: ClassVar[str]
    needs: ClassVar[frozenset[str]] = _NOTHING
    #: Whether `advance` writes every tensor of `bucket.out`, whatever is in it; else these start as copies.
    writes_all: ClassVar[bool] = False

    regulator: Regulator = field(default_factory=Regulator)

    @property
    def name(self) -> str:
        """The name that `predictor` and `unlatch.schedule.stability` know it by."""
        return self.kind

    def needs_with(self, optimizer: Optimizer) -> frozenset[str]:
        """What of `needs` this optimizer really requires; raises `ConfigError` if it cannot be predicted."""
        return self.needs

    def history(self, params: Sequence[Tensor], optimizer: Optimizer) -> History:
        """A history that keeps just what is needed for `optimizer`."""
        return History(params, self.needs_with(optimizer), optimizer)

    @torch.no_grad()
    def predict(
        self,
        params: Sequence[Tensor],
        optimizer: Optimizer,
        steps: int,
        history: History,
        out: Sequence[Tensor] | None = None,
        rates: Sequence[Sequence[float]] | None = None,
    ) -> list[Tensor]:
        """The weights expected after `steps` more updates.

        **Arguments:**

        - `params`: the current weights, in the order the history knows; not changed. Those that have not been updated
          yet or do not belong to the optimizer are predicted to stay.
        - `steps`: number of updates ahead; 0 or less predicts the current weights.
        - `out`: tensors to write to; new ones if None. They never share memory with `params`.
        - `rates`: for each group of the optimizer its learning rate at each of these updates; those that it has now if
          None.

        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5)
        >>> w.grad = torch.full((1,), -8.0); optimizer.step()
        >>> Linear().predict([w], optimizer, 2, History([w]))
        [tensor([24.])]
        """
        if out is None:
            out = [torch.empty_like(p, requires_grad=False) for p in params]
        result = list(out)
        found: list[Bucket] = []
        if steps > 0:
            coming = [[float(g["lr"])] * steps for g in optimizer.param_groups] if rates is None else rates
            found = list(forms.buckets(params, optimizer, result, coming))
        written = {i for bucket in found for i in bucket.where} if self.writes_all else set[int]()
        rest = [(there, here) for i, (there, here) in enumerate(zip(result, params, strict=True)) if i not in written]
        if rest:
            torch._foreach_copy_([there for there, _ in rest], [here for _, here in rest])
        for bucket in found:
            self.advance(bucket, optimizer, steps, history)
        return result

    @abstractmethod
    def advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        """Move `bucket.out` from the current to the predicted weights; called for each group of the optimizer.

        See `writes_all` for what is in it before.
        """


@dataclass(frozen=True)
class NoPrediction(Predictor):
    """The current weights."""

    kind: ClassVar[str] = "none"

    def advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        pass


@dataclass(frozen=True)
class Difference(Predictor):
    """Extend the last step R(s) times, for any optimizer. After a change of the learning rate it lags one update."""

    kind: ClassVar[str] = "difference"
    needs: ClassVar[frozenset[str]] = _UPDATE
    writes_all: ClassVar[bool] = True

    def advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        momentum = forms.momentum_of(bucket.group, optimizer) if self.regulator.rho == "geometric" else 0.0
        _repeat_update(bucket, history, self.regulator(steps, momentum))


@dataclass(frozen=True)
class Linear(Predictor):
    """Follow the optimizer's present velocity R(s) times, at the mean of the coming learning rates.

    SGD without momentum has no velocity; its last step takes that place.
    """

    kind: ClassVar[str] = "linear"
    needs: ClassVar[frozenset[str]] = _UPDATE
    writes_all: ClassVar[bool] = True

    def needs_with(self, optimizer: Optimizer) -> frozenset[str]:
        require_closed_form(self.name, optimizer)
        plain = isinstance(optimizer, SGD) and any(group["momentum"] == 0 for group in optimizer.param_groups)
        return _UPDATE if plain else _NOTHING

    def advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        require_closed_form(self.name, optimizer)
        momentum = forms.momentum_of(bucket.group, optimizer)
        reach, fade = self.regulator(steps, momentum), self.regulator.fade(momentum)
        if not isinstance(optimizer, SGD):
            forms.adam_repeat(bucket, reach, fade)
        elif bucket.group["momentum"] == 0:
            _repeat_update(bucket, history, reach * _rate_change(bucket, history, fade))
        else:
            forms.sgd_follow(bucket, reach, fade)


@dataclass(frozen=True)
class Geometric(Predictor):
    """Let the motion fade by the momentum from update to update.

    **Arguments:**

    - `along`: what fades under Nesterov momentum: the last `"step"`, or the optimizer's `"buffer"`, which is exact when
      no new gradients come. Otherwise it makes no difference.
    """

    kind: ClassVar[str] = "geometric"
    needs: ClassVar[frozenset[str]] = _UPDATE
    writes_all: ClassVar[bool] = True

    regulator: Regulator = field(default_factory=lambda: Regulator(rho="geometric"))
    along: Literal["step", "buffer"] = "step"

    def __post_init__(self) -> None:
        if self.regulator.rho != "geometric":
            raise ConfigError(
                f"predictor 'geometric' with rho={self.regulator.rho!r}: its rho is 'geometric', only alpha is free; "
                "use predictor 'linear' or 'difference' for another rho"
            )
        if self.along not in ("step", "buffer"):
            raise ConfigError(f"predictor 'geometric' along {self.along!r}: expected 'step' or 'buffer'")

    @property
    def name(self) -> str:
        return "geometric" if self.along == "step" else "coasting"

    def needs_with(self, optimizer: Optimizer) -> frozenset[str]:
        require_closed_form(self.name, optimizer)
        measured = self.along == "step" and isinstance(optimizer, SGD)
        return _UPDATE if measured and any(group["nesterov"] for group in optimizer.param_groups) else _NOTHING

    def advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        require_closed_form(self.name, optimizer)
        if not isinstance(optimizer, SGD):
            forms.adam_coast(bucket, self.regulator.alpha)
            return
        momentum = float(bucket.group["momentum"])
        reach = self.regulator(steps, momentum)
        if momentum == 0:
            bucket.stay()
        elif bucket.group["nesterov"] and self.along == "step":
            _repeat_update(bucket, history, reach * _rate_change(bucket, history, momentum))
        else:
            forms.sgd_follow(bucket, reach * (momentum if bucket.group["nesterov"] else 1.0), momentum)


@dataclass(frozen=True)
class ConstantGradient(Predictor):
    """Run the optimizer's own updates with the last gradient; a regulator may cap their number and scale the result."""

    kind: ClassVar[str] = "constant-gradient"
    needs: ClassVar[frozenset[str]] = frozenset({"gradient"})

    def __post_init__(self) -> None:
        if self.regulator.rho not in ("steps", "capped") or (self.regulator.cap or 1) % 1:
            raise ConfigError(
                f"predictor 'constant-gradient' with rho={self.regulator.rho!r}, cap={self.regulator.cap}: it takes "
                "whole updates, so rho must be 'steps', or 'capped' with a whole cap"
            )

    def needs_with(self, optimizer: Optimizer) -> frozenset[str]:
        require_closed_form(self.name, optimizer)
        return self.needs

    def advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        require_closed_form(self.name, optimizer)
        _require_kept("gradient", history)
        gradient = history.gradient
        if gradient is None:
            return
        if isinstance(optimizer, SGD):
            moving = bucket.having("momentum_buffer") if bucket.group["momentum"] else bucket
        else:
            moving = bucket.having("exp_avg")
        moving = moving.only([gradient[i] is not None for i in moving.where])
        forces = [g for i in moving.where if (g := gradient[i]) is not None]
        if forces:
            count = int(min(steps, self.regulator.cap or steps))
            iterate = forms.sgd_iterate if isinstance(optimizer, SGD) else forms.adam_iterate
            iterate(moving, forces, count)
            forms.scale_displacement(moving, self.regulator.alpha)


def _require_kept(kind: str, history: History) -> None:
    if kind not in history.needs:
        raise ConfigError(
            f"this prediction needs the last {kind}, but the history keeps {sorted(history.needs) or 'nothing'}: "
            "make it with predictor.history(params, optimizer)"
        )


def _rate_change(bucket: Bucket, history: History, fade: float) -> float:
    """How many times the rate of the last step the coming ones are. A step at rate 0 tells nothing of a direction."""
    last = history.rate(bucket.where[0])
    if last is None:
        return 1.0
    return bucket.mean_rate(fade) / last if last else 0.0


def _repeat_update(bucket: Bucket, history: History, reach: float) -> None:
    _require_kept("update", history)
    if history.previous is not None and reach:
        forms.extend(bucket, [history.previous[i] for i in bucket.where], reach)
    else:
        bucket.stay()


_BY_NAME: dict[str, Callable[[], Predictor]] = {
    "none": NoPrediction,
    "difference": Difference,
    "linear": Linear,
    "geometric": Geometric,
    "coasting": lambda: Geometric(along="buffer"),
    "constant-gradient": ConstantGradient,
}


def predictor(
    choice: str | Predictor | None, regulator: Regulator | None = None, alpha: float | None = None
) -> Predictor:
    """Look a predictor up by name; objects pass through. `regulator` replaces its regulator, `alpha` only the factor.

    >>> predictor("linear", alpha=0.5)
    Linear(regulator=Regulator(alpha=0.5, rho='steps', cap=None, power=None))
    """
    if isinstance(choice, Predictor):
        found = choice
    else:
        name = choice or "none"
        if name not in _BY_NAME:
            near = get_close_matches(name, _BY_NAME, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(_BY_NAME)}"
            raise ConfigError(f"unknown predictor {name!r}: {hint}")
        found = _BY_NAME[name]()
    wanted = regulator or found.regulator
    return replace(found, regulator=wanted if alpha is None else replace(wanted, alpha=alpha))
