"""Decoupled training with re-computation (DTR), with weight prediction (DTRP), and their forward-first relative DSP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ConfigError
from ..nn.chain import Block
from ..rules.activations import Input
from ..rules.bundle import Rules
from ..rules.predict import Predictor
from ..schedule import Schedule, ticked
from .base import Delayed, register
from .compensation import choose_compensation
from .options import Whole

__all__ = ["DSP", "DTR", "DTRP"]


@register
@dataclass(frozen=True)
class DSP(Delayed):
    """Diversely stale parameters (Xu et al. 2020): inputs kept, graph rebuilt at current weights, forward first."""

    name = "dsp"
    summary = "ticked, delay 2(K-k), inputs kept, forward first"

    def schedule(self, stages: int) -> Schedule:
        return ticked(stages)

    def rules(self) -> Rules:
        return self._rules(Input())


@register
@dataclass(frozen=True)
class DTR(Delayed):
    """Decoupled training with re-computation (Peng et al. 2023): as DSP, but the backward comes first in each tick.

    >>> DTR().lateness(4)
    (5, 3, 1, 0)
    """

    name = "dtr"
    summary = "ticked, delay 2(K-k), inputs kept, backward first"

    def schedule(self, stages: int) -> Schedule:
        return ticked(stages, backward_first=True)

    def rules(self) -> Rules:
        return self._rules(Input())


@register
@dataclass(frozen=True)
class DTRP(DTR):
    """DTR whose first forward runs at predicted weights, with per-stage step sizes and batch compensation.

    The formulas of prediction, regulator and compensation are reconstructions; the schedule is the published one.

    **Arguments:**

    - `compensate`: process this many batches as one; `"auto"` measures and chooses.
    - `compensate_lr`: how the learning rate follows: `"none"`, `"linear"` (with warm-up) or `"sqrt"`.
    - `compensate_warmup`: updates over which the linear rule is phased in.
    """

    predict: str | Predictor = "geometric"
    compensate: Whole | Literal["auto"] = 1
    compensate_lr: Literal["none", "linear", "sqrt"] = "none"
    compensate_warmup: int = 100

    name = "dtrp"
    summary = "dtr with predicted forward weights"

    @property
    def joined(self) -> int:
        return 1 if self.compensate == "auto" else self.compensate

    def joining(self, batches: int) -> DTRP:
        return replace(self, compensate=batches)

    @property
    def scales_lr(self) -> bool:  # type: ignore[override]
        return self.compensate_lr != "none"

    def tune(self, stages: Sequence[Sequence[Block]], sample: Any, loss_fn: Any) -> tuple[dict[str, Any], str]:
        if self.compensate != "auto":
            return {}, ""
        if sample is None:
            raise ConfigError('compensate="auto" measures batches of several sizes: pass sample=(x, y)')
        count, why = choose_compensation(stages, sample, loss_fn)
        return {"compensate": count}, why

    def lr_scale(self, update: int) -> float:
        """Factor on the learning rate of the `update`-th update that batch compensation asks for."""
        m = self.joined
        if self.compensate_lr == "sqrt":
            return float(m**0.5)
        if self.compensate_lr == "linear":
            return 1.0 + (m - 1.0) * min(1.0, update / max(1, self.compensate_warmup))
        return 1.0
