"""How far to predict: the delay regulator R(s) = alpha * rho(s) that replaces the raw number of steps s.

Far predictions overshoot, because the weights will have turned meanwhile; a regulator that saturates holds them back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ConfigError
from ..schedule.stability import geometric_factor

__all__ = ["Regulator", "Rho"]

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
