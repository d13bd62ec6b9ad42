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

A predictor works from the current weights and never writes to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..errors import ConfigError
from . import closed_forms as forms
from .closed_forms import Bucket, require_closed_form
from .history import History
from .regulator import Regulator

__all__ = [
    "ConstantGradient",
    "Difference",
    "Geometric",
    "History",
    "Linear",
    "NoPrediction",
    "Predictor",
    "Regulator",
    "predictor",
]

_NOTHING: frozenset[str] = frozenset()
_UPDATE = frozenset({"update"})


@dataclass(frozen=True)
class Predictor(ABC):
    """An assumption about the coming updates. `needs` is what a `History` must keep for it, whatever the optimizer."""

    kind: ClassVar[str]
    needs: ClassVar[frozenset[str]] = _NOTHING

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
        return History(params, self.needs_with(optimizer))

    @torch.no_grad()
    def predict(
        self,
        params: Sequence[Tensor],
        optimizer: Optimizer,
        steps: int,
        history: History,
        out: Sequence[Tensor] | None = None,
        lr_scale: float = 1.0,
    ) -> list[Tensor]:
        """The weights expected after `steps` more updates.

        **Arguments:**

        - `params`: the current weights, in the order the history knows; not changed. Those that have not been updated
          yet or do not belong to the optimizer are predicted to stay.
        - `steps`: number of updates ahead; 0 or less predicts the current weights.
        - `out`: tensors to write to; new ones if None. They never share memory with `params`.
        - `lr_scale`: factor on the lr of every group during updates. Differences measured in the past hold it already.

        >>> w = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5)
        >>> w.grad = torch.full((1,), -8.0); optimizer.step()
        >>> Linear().predict([w], optimizer, 2, History([w]))
        [tensor([24.])]
        """
        if out is None:
            out = [torch.empty_like(p, requires_grad=False) for p in params]
        result = list(out)
        if result:
            torch._foreach_copy_(result, list(params))
        if steps > 0:
            for bucket in forms.buckets(params, optimizer, result, lr_scale):
                self._advance(bucket, optimizer, steps, history)
        return result

    @abstractmethod
    def _advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        """Move `bucket.out` from the current to the predicted weights."""


@dataclass(frozen=True)
class NoPrediction(Predictor):
    """The current weights."""

    kind: ClassVar[str] = "none"

    def _advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        pass


@dataclass(frozen=True)
class Difference(Predictor):
    """Extend the last step R(s) times, for any optimizer. After a change of the learning rate it lags one update."""

    kind: ClassVar[str] = "difference"
    needs: ClassVar[frozenset[str]] = _UPDATE

    def _advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        momentum = forms.momentum_of(bucket.group, optimizer) if self.regulator.rho == "geometric" else 0.0
        _repeat_update(bucket, history, self.regulator(steps, momentum))


@dataclass(frozen=True)
class Linear(Predictor):
    """Follow the optimizer's present velocity R(s) times, at the learning rate now in force.

    SGD without momentum has no velocity; its last step takes that place.
    """

    kind: ClassVar[str] = "linear"
    needs: ClassVar[frozenset[str]] = _UPDATE

    def needs_with(self, optimizer: Optimizer) -> frozenset[str]:
        require_closed_form(self.name, optimizer)
        plain = isinstance(optimizer, SGD) and any(group["momentum"] == 0 for group in optimizer.param_groups)
        return _UPDATE if plain else _NOTHING

    def _advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        require_closed_form(self.name, optimizer)
        reach = self.regulator(steps, forms.momentum_of(bucket.group, optimizer))
        if not isinstance(optimizer, SGD):
            moving = bucket.having("exp_avg")
            if moving.out:
                forms.adam_repeat(moving, reach)
        elif bucket.group["momentum"] == 0:
            _repeat_update(bucket, history, reach)
        else:
            forms.sgd_follow(bucket, reach)


@dataclass(frozen=True)
class Geometric(Predictor):
    """Let the motion fade by the momentum from update to update.

    **Arguments:**

    - `along`: what fades under Nesterov momentum: the last `"step"`, or the optimizer's `"buffer"`, which is exact when
      no new gradients come. Otherwise it makes no difference.
    """

    kind: ClassVar[str] = "geometric"
    needs: ClassVar[frozenset[str]] = _UPDATE

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

    def _advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
        require_closed_form(self.name, optimizer)
        if not isinstance(optimizer, SGD):
            moving = bucket.having("exp_avg")
            if moving.out:
                forms.adam_coast(moving, steps)
                forms.scale_displacement(moving, self.regulator.alpha)
            return
        momentum = float(bucket.group["momentum"])
        reach = self.regulator(steps, momentum)
        if momentum == 0:
            return
        if bucket.group["nesterov"] and self.along == "step":
            _repeat_update(bucket, history, reach)
        else:
            forms.sgd_follow(bucket, reach * (momentum if bucket.group["nesterov"] else 1.0))


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

    def _advance(self, bucket: Bucket, optimizer: Optimizer, steps: int, history: History) -> None:
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


def _repeat_update(bucket: Bucket, history: History, reach: float) -> None:
    _require_kept("update", history)
    if history.update is not None and reach:
        torch._foreach_add_(bucket.out, [history.update[i] for i in bucket.where], alpha=-reach)


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
