"""All stages at once: no stage waits for another's forward or backward, as in AuxNet, DGL and DNI."""

from __future__ import annotations

from .flushed import Sequential

__all__ = ["Concurrent"]


class Concurrent(Sequential):
    """Every stage does the forward and the backward of a micro-batch with inputs and seeds of its own making.

    The listed order is one in which all stages can be worked through by a single process; between the stages there is
    no dependency (`independent`), so `simulate`, which assumes the chain of backpropagation, does not describe it.

    >>> " ".join(map(str, Concurrent(2).feed(0, 1)))
    '0F0 1F0 1B0 0B0'
    """

    #: Whether stages depend on each other's forward and backward of the same micro-batch.
    independent = True
