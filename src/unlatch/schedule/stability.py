"""How much delay a stage can bear: the largest stable lr x curvature.

On one direction of curvature c the update of a stage whose gradients come from older weights is a linear recursion in
a = lr x c. Its limit a* is the first a at which a mode of the recursion leaves the unit circle. Micro-batch `b` runs
forward at `U((b - lateness) // M)` and updates `U(b // M)`, so the M micro-batches of one update see versions that are
`ceil((lateness - j) / M)` updates old, j = 0..M-1, the same in every period: counted in updates the recursion does not
depend on time.

With w the weights and g the summed gradient as z-transforms, w = -P(z) g for the optimizer and g = a A(z) w + a B(z) g
for delay and prediction. Modes solve 1 + a L(z) = 0 with L = P A - B, so a mode sits on the unit circle exactly where
L(exp(i theta)) is real and negative; a* is the smallest such -1 / L.

The limit orders settings by how much accuracy delay costs them; it does not choose a learning rate (networks with
batch norm adapt their curvature to it), and the brackets below were observed in short image runs with momentum 0.9.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

__all__ = [
    "auto_microbatches",
    "geometric_factor",
    "is_modelled",
    "predicts",
    "stability_limit",
    "version_lateness",
    "wants_prediction",
]

_Complex = npt.NDArray[np.complexfloating[Any, Any]]

ABOUT_BP = 0.15
SOME_LOSS = 0.05
FEWEST_SAMPLES = 8
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


def stability_limit(
    lateness: int,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    predictor: str | None = None,
    alpha: float = 1.0,
    microbatches: int = 1,
) -> float:
    """a*: the largest stable lr x curvature of a stage.

    **Arguments:**

    - `lateness`: micro-batches that pass between the weights a micro-batch runs forward with and those it updates.
    - `momentum`, `nesterov`: as in `torch.optim.SGD`.
    - `predictor`: which weights the forward runs at; names as in `unlatch.rules.predict`. `geometric` extends the last
      step `W_n - W_{n-1}` by `geometric_factor`; `coasting` and `linear` extend the momentum buffer. With heavy-ball
      momentum buffer and last step are the same thing; under Nesterov they are not.
    - `alpha`: factor on the predicted displacement.
    - `microbatches`: micro-batches averaged in one update.

    >>> round(stability_limit(5), 3), round(stability_limit(5, nesterov=True, microbatches=4), 3)
    (0.022, 0.176)
    """
    name = predictor or "none"
    if not is_modelled(name):
        raise ConfigError(f"no stability model for predictor {name!r}: expected one of {', '.join(PREDICTORS)}")
    if lateness < 0 or microbatches < 1:
        raise ConfigError(
            f"lateness {lateness} with {microbatches} micro-batches: "
            "expected a lateness of at least 0 and at least 1 micro-batch"
        )
    if not 0.0 <= momentum < 1.0:
        raise ConfigError(f"momentum {momentum}: expected 0 <= momentum < 1")
    return _first_crossing(version_lateness(lateness, microbatches), momentum, nesterov, name, alpha)


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


@lru_cache(maxsize=4096)
def _first_crossing(updates: tuple[int, ...], momentum: float, nesterov: bool, name: str, alpha: float) -> float:
    terms = [
        (late, count / len(updates), *(alpha * c for c in _displacement(name, momentum, nesterov, late)))
        for late, count in Counter(updates).items()
    ]

    def gain(theta: npt.NDArray[np.float64]) -> _Complex:
        z: _Complex = np.exp(1j * theta)
        numerator = (1.0 + momentum) * z - momentum if nesterov else z
        optimizer = numerator / ((z - 1.0) * (z - momentum))
        step, velocity = (z - 1.0) / z, (z - 1.0) / numerator
        total: _Complex = np.zeros_like(z)
        for late, weight, on_step, on_velocity, on_gradient in terms:
            forward = 1.0 + on_step * step + on_velocity * velocity
            total += weight * z**-late * (forward * optimizer + on_gradient / z)
        return total

    # The gain turns about max(updates) + 2 times over half the circle; near 0 it varies on the scale of 1 - momentum.
    grid = np.union1d(np.geomspace(1e-7, 0.1, 400), np.linspace(0.01, math.pi, 64 * (max(updates) + 4)))
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
    """Micro-batches per update for the largest lateness: that rounded down to a power of two, at least 1.

    With a known `batch_size` never so many that a micro-batch has fewer than 8 samples (batch statistics suffer).

    >>> [auto_microbatches(late) for late in (0, 1, 3, 5, 9, 14)], auto_microbatches(9, batch_size=40)
    ([1, 1, 2, 4, 8, 8], 4)
    """
    wanted = lateness if batch_size is None else min(lateness, batch_size // FEWEST_SAMPLES)
    return 1 << (max(1, wanted).bit_length() - 1)


def predicts(predictor: str | None) -> bool:
    """Whether a predictor of this name does anything.

    >>> predicts("linear"), predicts("none"), predicts(None)
    (True, False, False)
    """
    return predictor not in (None, "none")


def is_modelled(predictor: str | None) -> bool:
    """Whether the recursion knows what a predictor of this name does, so that there is a limit.

    >>> is_modelled("linear"), is_modelled(None), is_modelled("of my own")
    (True, True, False)
    """
    return predictor is None or predictor in PREDICTORS


def wants_prediction(lateness: int, microbatches: int) -> bool:
    """Whether prediction is worth having: the delay exceeds 1.5 updates; below that it rather takes stability away."""
    return lateness / microbatches > 1.5
