"""Which rank holds which stages: contiguous runs, so that every border has one neighbour."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from ..plan.partition import contiguous_split

__all__ = ["place"]


def place(stages: int, ranks: int, costs: Sequence[float] | None = None) -> list[range]:
    """Spread stages over ranks with the smallest possible largest load.

    **Arguments:** `costs`: time per stage; equal if unknown.

    >>> place(4, 2)
    [range(0, 2), range(2, 4)]
    """
    if ranks > stages:
        raise PlanError(
            f"{ranks} ranks cannot share {stages} stage(s): start at most {stages} processes, or cut the model into "
            "more stages"
        )
    starts = contiguous_split(costs or [1.0] * stages, ranks)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], stages], strict=True)]
