"""The rules by which a verdict follows from numbers, which the page states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unlatch.report.paired import Paired

HELD, NOT_HELD, UNDECIDED, PARTLY = "held", "not held", "undecided", "partly"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured yet"
#: What a row may come to, in the order of the summary.
VERDICTS = (HELD, PARTLY, NOT_HELD, UNDECIDED, NOT_COMPARABLE, NOT_MEASURED)
#: Points that a method may lose and still be as good as backpropagation.
MARGIN = 1.0
#: How far a number may be from a published one.
NEAR = 0.1


class Case(NamedTuple):
    """Numbers in words, and what follows from them."""

    text: str
    verdict: str


def as_good(found: Paired) -> str:
    """No more than a point below: the whole 95 % interval is above -1. Not: it is below zero, and reaches below -1.

    >>> [as_good(Paired(dict(enumerate(d)))) for d in ([-0.1, 0, 0.1], [-2, -2.1, -1.9], [-3, 0, 2])]
    ['held', 'not held', 'undecided']
    """
    if not found.is_result or found.interval is None:
        return UNDECIDED
    low, high = found.interval
    return HELD if low > -MARGIN else NOT_HELD if high < 0 else UNDECIDED


def better(found: Paired) -> str:
    """The whole 95 % interval of the difference is above zero. Not: it is below zero.

    >>> [better(Paired(dict(enumerate(d)))) for d in ([1, 1.1, 0.9], [-2, -2.1, -1.9], [-3, 0, 2])]
    ['held', 'not held', 'undecided']
    """
    if not found.apart:
        return UNDECIDED
    return HELD if found.mean > 0 else NOT_HELD


def near(ours: float, published: float) -> str:
    """Within 10 % of a number.

    >>> near(1.09, 1.0), near(1.2, 1.0)
    ('held', 'not held')
    """
    return HELD if abs(ours / published - 1) <= NEAR else NOT_HELD


def holds(condition: bool) -> str:
    """An order of numbers that have no spread, since they are counted, simulated, or a whole range."""
    return HELD if condition else NOT_HELD


def together(verdicts: Sequence[str]) -> str:
    """The verdict on a row of several cases; those that were not measured count only where nothing was.

    >>> together(["held", "held", "not measured yet"]), together(["held", "not held"]), together(["undecided"])
    ('held', 'partly: 1 of 2', 'undecided')
    >>> together(["undecided", "not held"]), together(["not measured yet"]), together(["partly: 1 of 3", "held"])
    ('not held', 'not measured yet', 'partly: 1 of 2')
    """
    for only in (NOT_MEASURED, NOT_COMPARABLE):
        if all(verdict == only for verdict in verdicts):
            return only
    counted = [verdict for verdict in verdicts if verdict not in (NOT_MEASURED, NOT_COMPARABLE)]
    if not counted:
        return NOT_MEASURED
    held = counted.count(HELD)
    if held == len(counted):
        return HELD
    if held or any(verdict.startswith(PARTLY) for verdict in counted):
        return f"{PARTLY}: {held} of {len(counted)}" if held else PARTLY
    return NOT_HELD if NOT_HELD in counted else UNDECIDED
