"""Batches from a loader of any kind: what is no pair is refused, and what a loader raises says that it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import DataError

__all__ = ["pairs"]


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    return x, y


def pairs(
    loader: Iterable[Any], what: str, taken_in: Callable[..., tuple[Any, Any]] = _pair, *, mappings: bool = False
) -> Iterator[tuple[Any, Any]]:
    """The batches `(x, y)` of a loader, one by one.

    **Arguments:**

    - `what`: who needs them, for error texts.
    - `taken_in`: what becomes of the two parts of a batch.
    - `mappings`: whether batches may be dicts, which `taken_in` is then given whole.

    >>> list(pairs([(1, 2), (3, 4, 5)], "fit"))
    Traceback (most recent call last):
        ...
    unlatch.errors.DataError: fit needs a loader of pairs (x, y), got a tuple of 3 from it; adapt the loader
    """
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise DataError(f"{what} needs a loader of pairs (x, y), got {type(loader).__name__}; it cannot be iterated")
    # At once, not with the first batch: a loader may draw random numbers here.
    batches = _numbered(iter(loader))
    return (taken_in(*_parts(batch, what, mappings)) for batch in batches)


def _parts(batch: Any, what: str, mappings: bool) -> Sequence[Any]:
    if mappings and isinstance(batch, Mapping):
        return (batch,)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        of = f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else "")
        raise DataError(f"{what} needs a loader of pairs (x, y), got {of} from it; adapt the loader")
    return batch


def _numbered(batches: Iterator[Any]) -> Iterator[Any]:
    """The same; an error of the loader says how far it came."""
    count = 0
    try:
        for batch in batches:
            yield batch
            count += 1
    except DataError:
        raise
    except Exception as error:
        error.add_note(f"the loader raised this after {count} batches of the pass")
        raise
