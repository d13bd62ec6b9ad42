"""The exact optimum of cutting a row of work items into consecutive runs, where some items may be cut inside.

Whether runs of at most `c` exist is decided by filling one device after the other up to `c`. At the smallest such
`c` some devices are exactly full from one border between items to another, so `c` is a sum of items over a number
of devices, and a search on a grid finer than the distance of two such fractions finds it exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple

from ..errors import PlanError

__all__ = ["Part", "best_interval", "fill", "split_row"]


class Part(NamedTuple):
    """The share of one item that one device has."""

    item: int
    device: int
    fraction: Fraction


class Row:
    """A row of items, with sizes scaled to whole numbers.

    **Arguments:**

    - `sizes`: of the items.
    - `divisible`: which of them may be cut inside.
    - `most_parts`: into how many parts an item may be cut at most; `None` is no limit, and 2 the only other choice.
    """

    def __init__(self, sizes: Sequence[Fraction], divisible: Sequence[bool], most_parts: int | None = None) -> None:
        if most_parts not in (None, 2):
            raise PlanError(f"an item is cut into at most 2 parts or into any number (None), not {most_parts}")
        self.scale = lcm(*(size.denominator for size in sizes)) if sizes else 1
        self.sizes = [int(size * self.scale) for size in sizes]
        self.divisible = list(divisible)
        self.ends = [0, *accumulate(self.sizes)]
        self.most_parts = most_parts

    @property
    def total(self) -> int:
        """Size of the whole row."""
        return self.ends[-1]

    def borders(self, limit: int, per: int, devices: int) -> list[int] | None:
        """Positions, times `per`, at which runs of at most `limit / per` end; `None` if `devices` do not suffice."""
        at = 0
        goal = self.total * per
        found: list[int] = []
        while at < goal:
            if len(found) == devices:
                return None
            reach = at + limit
            if reach >= goal:
                after = goal
            else:
                item = bisect_right(self.ends, reach // per) - 1
                after = reach if self._may_cut(item, at, reach, limit, per) else self.ends[item] * per
            if after <= at:
                return None
            found.append(after)
            at = after
        return found

    def _may_cut(self, item: int, at: int, reach: int, limit: int, per: int) -> bool:
        if not self.divisible[item]:
            return False
        if self.most_parts is None or self.ends[item] * per == reach:
            return True
        # The rest must fit on the next device, and this must not be the second part already.
        return self.ends[item + 1] * per - reach <= limit and at <= self.ends[item] * per


def best_interval(row: Row, devices: int) -> Fraction:
    """The smallest possible size of the largest run, when there are at most `devices` runs.

    >>> best_interval(Row([Fraction(2), Fraction(3), Fraction(2)], [False, True, False]), 2)
    Fraction(7, 2)
    >>> best_interval(Row([Fraction(2), Fraction(3), Fraction(2)], [False] * 3), 2)
    Fraction(5, 1)
    """
    if devices < 1:
        raise PlanError(f"expected at least 1 device, got {devices}")
    atomic = max((size for size, cut in zip(row.sizes, row.divisible, strict=True) if not cut), default=0)
    shared = max((size for size, cut in zip(row.sizes, row.divisible, strict=True) if cut), default=0)
    floor = max(Fraction(row.total, devices), Fraction(atomic))
    if row.most_parts is not None:
        floor = max(floor, Fraction(shared, row.most_parts))
    if row.borders(floor.numerator, floor.denominator, devices) is not None:
        return floor / row.scale
    # Two different sums over at most `devices` devices are further apart than two steps of this grid.
    grid = 2 * devices * devices
    low, high = int(floor * grid), int((floor + max(atomic, shared)) * grid) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if row.borders(middle, grid, devices) is None:
            low = middle
        else:
            high = middle
    return Fraction(high, grid).limit_denominator(devices) / row.scale


def fill(row: Row, interval: Fraction, devices: int) -> list[Part]:
    """Give every device in turn as much of the row as fits into `interval`.

    >>> [tuple(map(str, part)) for part in fill(Row([Fraction(1), Fraction(2)], [False, True]), Fraction(2), 2)]
    [('0', '0', '1'), ('1', '0', '1/2'), ('1', '1', '1/2')]
    """
    limit = interval * row.scale
    per = limit.denominator
    borders = row.borders(limit.numerator, per, devices)
    if borders is None:
        raise PlanError(f"{devices} devices do not suffice for runs of at most {interval}")
    parts: list[Part] = []
    item = 0
    for device, (start, end) in enumerate(pairwise([0, *borders])):
        while item < len(row.sizes) and row.ends[item + 1] * per <= end:
            parts.append(_part(row, item, device, start, end, per))
            item += 1
        if item < len(row.sizes) and row.ends[item] * per < end:
            parts.append(_part(row, item, device, start, end, per))
    # Items of no size after the last border.
    parts += [Part(rest, max(0, len(borders) - 1), Fraction(1)) for rest in range(item, len(row.sizes))]
    return parts


def split_row(
    sizes: Sequence[Fraction], divisible: Sequence[bool], devices: int, most_parts: int | None = None
) -> tuple[Fraction, list[Part]]:
    """The smallest largest run, and which device has which share of which item.

    >>> interval, parts = split_row([Fraction(1)] * 3, [False, True, False], 2)
    >>> interval, parts[1].fraction
    (Fraction(3, 2), Fraction(1, 2))
    """
    row = Row(sizes, divisible, most_parts)
    interval = best_interval(row, devices)
    return interval, fill(row, interval, devices)


def _part(row: Row, item: int, device: int, start: int, end: int, per: int) -> Part:
    if row.sizes[item] == 0:
        return Part(item, device, Fraction(1))
    first, last = max(start, row.ends[item] * per), min(end, row.ends[item + 1] * per)
    return Part(item, device, Fraction(last - first, row.sizes[item] * per))
