"""How the learning rate moves over a run: a factor of the peak, as a function of the update.

Every stage owns an optimizer and steps it on its own clock, so the learning rate is not a thing but a recipe: a
picklable factory that travels to the stage's process and is called there with the stage's optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["LRCurve", "LRFactory"]


@dataclass(frozen=True)
class LRCurve:
    """The factor of the peak learning rate at each update.

    **Arguments:**

    - `shape`: `constant`, `onecycle` (straight down to `final`), `cosine` (down to `final`), or `step`.
    - `total`: updates in the run; the first is number 0, and `final` is reached at number `total`, just after the last.
    - `warmup`: updates of straight rise before the shape begins; the first update already has a step size.
    - `final`: factor at the end.
    - `milestones`: for `step`, the fractions of the run at which the factor falls.
    - `factor`: for `step`, how much of it remains.

    >>> curve = LRCurve("onecycle", total=10, warmup=2)
    >>> [round(curve(update), 3) for update in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    shape: str
    total: int
    warmup: int = 0
    final: float = 0.0
    milestones: tuple[float, ...] = ()
    factor: float = 0.1

    def __call__(self, update: int) -> float:
        if update < self.warmup:
            return (update + 1) / self.warmup
        # Pipelines may take a few updates beyond the plan (short epochs, a resumed run): stay at the end.
        progress = min(1.0, (update - self.warmup) / max(1, self.total - self.warmup))
        match self.shape:
            case "constant":
                return 1.0
            case "onecycle":
                return 1.0 + (self.final - 1.0) * progress
            case "cosine":
                return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * progress)) / 2
            case "step":
                passed = sum(update >= milestone * self.total for milestone in self.milestones)
                return self.factor**passed
        raise ValueError(f"no learning-rate curve {self.shape!r}: expected constant, onecycle, cosine or step")


@dataclass(frozen=True)
class LRFactory:
    """`lr_scheduler=` for `parallelize`: attaches the curve to one stage's optimizer.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    >>> scheduler = LRFactory(LRCurve("onecycle", total=4, warmup=2))(optimizer)
    >>> optimizer.param_groups[0]["lr"]
    0.2
    """

    curve: LRCurve

    def __call__(self, optimizer: Optimizer) -> LambdaLR:
        # A copy: loading a scheduler's state writes into its curve, and stages in one process must not share it.
        return LambdaLR(optimizer, replace(self.curve))
