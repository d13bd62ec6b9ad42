"""A number that may change while training: a constant, or points between which it is interpolated."""

from __future__ import annotations

import math
from itertools import pairwise

from ..errors import ConfigError

__all__ = ["Ramp", "as_ramp", "check_ramp", "value_at"]

Ramp = float | tuple[tuple[int, float], ...]


def value_at(ramp: Ramp, update: int) -> float:
    """The value at the `update`-th update: linear between points, constant before the first and after the last.

    >>> value_at(((0, 1.0), (100, 3.0)), 50)
    2.0
    >>> value_at(7.0, 50)
    7.0
    """
    if not isinstance(ramp, tuple):
        return float(ramp)
    if update <= ramp[0][0]:
        return float(ramp[0][1])
    for (start, low), (end, high) in pairwise(ramp):
        if update < end:
            return low + (high - low) * (update - start) / (end - start)
    return float(ramp[-1][1])


def as_ramp(ramp: object) -> Ramp:
    """The same with tuples for lists, as settings files write them.

    >>> as_ramp([[0, 1.0], [10, 2.0]])
    ((0, 1.0), (10, 2.0))
    """
    if isinstance(ramp, list | tuple):
        ramp = tuple(tuple(point) if isinstance(point, list | tuple) else point for point in ramp)
    return ramp  # type: ignore[return-value]


def check_ramp(name: str, ramp: Ramp, low: float, *, open_low: bool = False, high: float | None = None) -> None:
    """Raise `ConfigError` unless all values lie in the range and the points come in order.

    >>> check_ramp("beta", 0.0, 0.0, open_low=True)
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: beta must be above 0, got 0.0
    """
    points = ramp if isinstance(ramp, tuple) else ((0, ramp),)
    if not points or not all(isinstance(p, tuple) and len(p) == 2 for p in points):
        raise ConfigError(f"{name} must be a number or points ((update, value), ...), got {ramp!r}")
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise ConfigError(f"{name}: the updates of its points must grow, got {ramp!r}")
    bounds = f"above {low:g}" if open_low else f"at least {low:g}"
    bounds += f" and at most {high:g}" if high is not None else ""
    for _, value in points:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < low or (open_low and value == low) or (high is not None and value > high):
            finite = "finite and " if isinstance(value, float) and math.isinf(value) else ""
            raise ConfigError(f"{name} must be {finite}{bounds}, got {value!r}")
