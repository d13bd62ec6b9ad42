"""A micro-batch's identity card: it travels with every message and never changes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Micro"]


@dataclass(frozen=True, slots=True)
class Micro:
    """Which part of which batch, and which update it contributes to.

    **Arguments:**

    - `id`: counts micro-batches over the whole run.
    - `batch`: the user's batch it was cut from, counted over the whole run.
    - `index`, `count`: it is the `index`-th of `count` parts of that batch.
    - `size`: samples in it.
    - `scale`: weight of its mean loss in the batch's loss (`size / samples of the batch`).
    - `update`: number of the update it contributes to; also the version its backward will see.
    - `ends`: whether that update follows its backward.
    - `fresh`: whether it holds samples that were not met before, where the method asks.
    """

    id: int
    batch: int
    index: int
    count: int
    size: int
    scale: float
    update: int
    ends: bool
    fresh: bool = False

    def __str__(self) -> str:
        part = f", part {self.index + 1} of {self.count}" if self.count > 1 else ""
        return f"batch {self.batch}{part}"
