"""Batch compensation: several batches are processed as one, to fill a device that a single one leaves idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..nn.tree import Tree, copied, flatten, unflatten

__all__ = ["Compensation"]


class Compensation:
    """Collects `count` batches into one.

    >>> collect = Compensation(2)
    >>> collect.add(torch.zeros(3, 1), torch.zeros(3)) is None
    True
    >>> collect.add(torch.zeros(3, 1), torch.zeros(3))[0].shape
    torch.Size([6, 1])
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._waiting: list[tuple[Tree, Tree]] = []

    def add(self, x: Tree, y: Tree, leads: bool = True) -> tuple[Tree, Tree] | None:
        """**Returns:** the joined batch once it is complete. Ranks that do not lead only count."""
        self._waiting.append((x, y) if leads else (None, None))
        return self.rest() if len(self._waiting) == self.count else None

    @property
    def is_empty(self) -> bool:
        """Whether no batch waits for others to be joined with."""
        return not self._waiting

    def state(self) -> list[tuple[Tree, Tree]]:
        """Copies of the batches that wait."""
        return list(copied(self._waiting))

    def load(self, state: Sequence[tuple[Tree, Tree]]) -> None:
        """Take over what `state` returned."""
        self._waiting = list(copied(list(state)))

    def rest(self) -> tuple[Tree, Tree] | None:
        """What has been collected so far, joined; `None` if nothing."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return None
        return waiting[0] if len(waiting) == 1 else _join(waiting)


def _join(batches: list[tuple[Tree, Tree]]) -> Any:
    parts = [flatten(batch) for batch in batches]
    columns = zip(*[tensors for tensors, _ in parts], strict=True)
    return unflatten(parts[0][1], [torch.cat(column) for column in columns])
