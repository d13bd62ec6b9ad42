"""Batches from a loader of any kind: what is no pair is refused, and what a loader raises says that it did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import DataError

__all__ = ["pairs"]


def pairs(loader: Iterable[Any], what: str) -> Iterator[tuple[Any, Any]]:
    """The batches `(x, y)` of a loader, one by one.

    **Arguments:** `what`: who needs them, for error texts.

    >>> list(pairs([(1, 2), (3, 4, 5)], "fit"))
    Traceback (most recent call last):
        ...
    unlatch.errors.DataError: fit needs a loader of pairs (x, y), got a tuple of 3 from it; adapt the loader
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(f"{what} needs a loader of pairs (x, y), got {type(loader).__name__}; it cannot be iterated")
    # At once, not with the first batch: a loader may draw random numbers here.
    return _checked(iter(loader), what)


def _checked(batches: Iterator[Any], what: str) -> Iterator[tuple[Any, Any]]:
    count = 0
    try:
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                of = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
                raise DataError(f"{what} needs a loader of pairs (x, y), got {of} from it; adapt the loader")
            count += 1
            yield batch[0], batch[1]
    except DataError:
        raise
    except Exception as error:
        error.add_note(f"the loader raised this after {count} batches of the pass")
        raise
