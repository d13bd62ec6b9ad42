"""How much delay training can bear: the largest stable lr x curvature, of a stage and of all stages together.

On one direction of curvature c the update of a stage whose gradients come from older weights is a linear recursion in
a = lr x c. Its limit a* is the first a at which a mode of the recursion leaves the unit circle. Micro-batch `b` runs
forward at `U((b - lateness) // M)` and updates `U(b // M)`, so the M micro-batches of one update see versions that are
`ceil((lateness - j) / M)` updates old, j = 0..M-1, the same in every period: counted in updates the recursion does not
depend on time.

With w the weights of a stage and g the gradient as z-transforms, w = -Q(z) g for its optimizer, and what the stage adds
to the next gradient is a A(z) w + a B(z) g for delay and prediction. In a linear chain near its optimum the gradient of
every stage is the same sum over all stages, each at the weights its own forward saw; which weights a backward uses does
not matter there. So modes solve 1 + a L(z) = 0, where L is the mean over stages of Q A - B: stages that are in time
steady those that are late. A mode sits on the unit circle exactly where L(exp(i theta)) is real and negative; a* is the
smallest such -1 / L.

Optimizers differ in how far one gradient moves the weights in the end. Adam and its kin average gradients, so that it
is lr; with SGD it is lr / (1 - momentum). Counted by that total step instead of lr, limits of all of them compare: this
is what `Motion.total` is for. The limit orders settings by how much accuracy delay costs them; it does not choose a
learning rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = [
    "Lag",
    "Motion",
    "auto_microbatches",
    "chain_limit",
    "geometric_factor",
    "is_modelled",
    "stability_limit",
    "version_lateness",
]

_Complex = npt.NDArray[np.complexfloating[Any, Any]]

FEWEST_SAMPLES = 8
#: By so many updates a gradient is too late by default: `studies/cifar-delay-choice.toml`, on held-out images.
LATEST_UPDATES = 1.5
PREDICTORS = ("none", "difference", "linear", "geometric", "coasting", "constant-gradient")


def geometric_factor(momentum: float, steps: float) -> float:
    """mu + mu^2 + ... + mu^steps: how many times the last step a weight still moves when it coasts for `steps` updates.

    >>> round(geometric_factor(0.9, 5), 3)
    3.686
    """
    return float(steps) if momentum == 1.0 else momentum * (1.0 - momentum**steps) / (1.0 - momentum)


def version_lateness(lateness: int, microbatches: int) -> tuple[int, ...]:
    """Updates between forward and backward weights, for each micro-batch of one update.

    >>> version_lateness(5, 4)
    (2, 1, 1, 1)
    """
    return tuple(-((j - lateness) // microbatches) for j in range(microbatches))


@dataclass(frozen=True)
class Motion:
    """How an optimizer turns gradients into steps, in units of its learning rate.

    **Arguments:**

    - `momentum`, `nesterov`: as in `torch.optim.SGD`; `betas[0]` of an optimizer that averages gradients.
    - `fed`: weight of a new gradient in the momentum buffer: 1 - dampening, or 1 - `betas[0]`.
    - `decay`: learning rate x weight decay, whose pull is never late.
    - `decoupled`: whether decay goes past the momentum buffer.
    - `scale_free`: whether the size of gradients does not matter, as where an average is divided by it.

    >>> round(Motion(0.9).total, 3), round(Motion(0.9, fed=0.1).total, 3)
    (10.0, 1.0)
    """

    momentum: float = 0.9
    nesterov: bool = False
    fed: float = 1.0
    decay: float = 0.0
    decoupled: bool = False
    scale_free: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ConfigError(f"momentum {self.momentum}: expected 0 <= momentum < 1")

    @property
    def total(self) -> float:
        """How far one gradient moves the weights in the end, in learning rates."""
        return self.fed / (1.0 - self.momentum)

    @property
    def may_look_ahead(self) -> bool:
        """Whether the optimizer has Nesterov momentum as an option."""
        return self.momentum > 0.0 and self.fed == 1.0 and not self.scale_free


@dataclass(frozen=True)
class Lag:
    """One stage: how late its gradients are, and what it makes of them.

    **Arguments:**

    - `lateness`: micro-batches that pass between the weights a micro-batch runs forward with and those it updates.
    - `microbatches`: averaged in one update.
    - `predictor`: which weights the forward runs at; names as in `unlatch.rules.predict`. `geometric` extends the last
      step `W_n - W_{n-1}` by `geometric_factor`; `coasting` and `linear` extend the momentum buffer. With heavy-ball
      momentum buffer and last step are the same thing; under Nesterov they are not. Prediction does not see decay.
    - `alpha`: factor on the predicted displacement.
    - `scale`: factor on the stage's learning rate.
    - `shrink`: factor on its gradient.
    """

    lateness: int
    motion: Motion = Motion()
    microbatches: int = 1
    predictor: str | None = None
    alpha: float = 1.0
    scale: float = 1.0
    shrink: float = 1.0

    def __post_init__(self) -> None:
        if not is_modelled(self.predictor):
            raise ConfigError(
                f"no stability model for predictor {self.predictor!r}: expected one of {', '.join(PREDICTORS)}"
            )
        if self.lateness < 0 or self.microbatches < 1:
            raise ConfigError(
                f"lateness {self.lateness} with {self.microbatches} micro-batches: "
                "expected a lateness of at least 0 and at least 1 micro-batch"
            )


def stability_limit(
    lateness: int,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    predictor: str | None = None,
    alpha: float = 1.0,
    microbatches: int = 1,
) -> float:
    """a* of one stage alone under SGD. **Arguments:** as in `Motion` and `Lag`.

    >>> round(stability_limit(5), 3), round(stability_limit(5, nesterov=True, microbatches=4), 3)
    (0.022, 0.176)
    """
    return chain_limit([Lag(lateness, Motion(momentum, nesterov), microbatches, predictor, alpha)])


def chain_limit(stages: Sequence[Lag]) -> float:
    """a* of stages that share one curvature in equal parts.

    >>> late, in_time = Lag(1), Lag(0)
    >>> [round(chain_limit(stages), 3) for stages in ([late], [late, late], [late, in_time])]
    [0.1, 0.1, 0.2]
    """
    return _first_crossing(tuple(stages))


def _displacement(name: str, momentum: float, nesterov: bool, steps: int) -> tuple[float, float, float]:
    """Predicted move over `steps` updates, as multiples of (last step, minus velocity, minus last gradient)."""
    coast = geometric_factor(momentum, steps)
    if name == "difference":
        return steps, 0.0, 0.0
    if name == "geometric":
        return coast, 0.0, 0.0
    if name == "linear":
        return 0.0, steps, 0.0
    lead = momentum if nesterov else 1.0
    if name == "coasting":
        return 0.0, lead * coast, 0.0
    if name == "constant-gradient":
        fed = lead * (steps - coast) / (1.0 - momentum) + (steps if nesterov else 0.0)
        return 0.0, lead * coast, fed
    return 0.0, 0.0, 0.0


def _gain(stage: Lag, z: _Complex) -> _Complex:
    """L(z) of one stage."""
    motion, momentum = stage.motion, stage.motion.momentum
    numerator = (1.0 + momentum) * z - momentum if motion.nesterov else z
    standing = z - 1.0 + motion.decay * stage.scale if motion.decoupled else z - 1.0
    fed = motion.fed * stage.scale
    # From all that pulls at the weights to the weights; decay inside the gradient closes a loop of its own.
    pulled = fed * numerator / (standing * (z - momentum))
    optimizer = pulled if motion.decoupled else pulled / (1.0 + motion.decay * pulled)
    step, velocity = (z - 1.0) / z, standing / numerator
    updates = version_lateness(stage.lateness, stage.microbatches)
    total: _Complex = np.zeros_like(z)
    for late, count in Counter(updates).items():
        moves = _displacement(stage.predictor or "none", momentum, motion.nesterov, late)
        on_step, on_velocity, on_gradient = (stage.alpha * move for move in moves)
        forward = 1.0 + on_step * step + on_velocity * velocity
        total += count / len(updates) * z**-late * (forward * optimizer + on_gradient * fed / z)
    return stage.shrink * total


@lru_cache(maxsize=4096)
def _first_crossing(stages: tuple[Lag, ...]) -> float:
    alike = Counter(stages)

    def gain(theta: npt.NDArray[np.float64]) -> _Complex:
        z: _Complex = np.exp(1j * theta)
        total: _Complex = np.zeros_like(z)
        for stage, count in alike.items():
            total += count / len(stages) * _gain(stage, z)
        return total

    oldest = max(-(-stage.lateness // stage.microbatches) for stage in stages)
    # The gain turns about `oldest` + 2 times over half the circle; near 0 it varies on the scale of 1 - momentum.
    grid = np.union1d(np.geomspace(1e-7, 0.1, 400), np.linspace(0.01, math.pi, 64 * (oldest + 4)))
    sign = np.signbit(gain(grid).imag)
    turns = np.flatnonzero(sign[1:-1] != sign[:-2])
    low, high, below = grid[turns], grid[turns + 1], sign[turns]
    for _ in range(60):
        middle = (low + high) / 2
        left = np.signbit(gain(middle).imag) == below
        low, high = np.where(left, middle, low), np.where(left, high, middle)
    # theta = pi (z = -1) is real for every a and therefore never a change of sign.
    real = gain(np.append(low, math.pi)).real
    return float(np.min(-1.0 / real[real < 0.0], initial=math.inf))


def auto_microbatches(lateness: int, batch_size: int | None = None) -> int:
    """Micro-batches per update for the largest lateness: the fewest that leave it below one and a half updates.

    A power of two. With a known `batch_size` never so many that a micro-batch has fewer than 8 samples, since batch
    statistics suffer.

    >>> [auto_microbatches(late) for late in (0, 1, 3, 5, 9, 14)], auto_microbatches(9, batch_size=40)
    ([1, 1, 4, 4, 8, 16], 4)
    """
    parts = 1
    while LATEST_UPDATES * parts <= lateness and (batch_size is None or batch_size >= 2 * parts * FEWEST_SAMPLES):
        parts *= 2
    return parts


def is_modelled(predictor: str | None) -> bool:
    """Whether the recursion knows what a predictor of this name does, so that there is a limit.

    >>> is_modelled("linear"), is_modelled(None), is_modelled("of my own")
    (True, True, False)
    """
    return predictor is None or predictor in PREDICTORS
