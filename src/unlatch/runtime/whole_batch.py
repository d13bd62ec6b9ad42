"""Whether the losses of micro-batches make up the loss of their batch, looked at while a run is young."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from ..nn.tree import Tree, flatten, map_tensors, unflatten
from ..rules.losses import LossFunction, measured

__all__ = ["WholeBatch"]

log = logging.getLogger("unlatch")
#: Batches that are looked at.
_BATCHES = 4


class WholeBatch:
    """Collects outputs of the first batches and compares.

    A mean over tokens that are not padding is no mean over samples: weighed by their samples, micro-batches with
    different numbers of tokens give another gradient than the batch.

    **Arguments:** `loss_fn`: of output and target.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._left = _BATCHES
        self._seen: list[tuple[Tree, Tree, float, float]] = []
        #: What is to be told, once.
        self.news: list[str] = []

    def add(self, micro: Any, outputs: Tree, target: Tree, loss: Any, count: float | None) -> None:
        """Take note of a micro-batch, whose mean loss this is."""
        # Without a share of its own it is a batch, or its loss is a sum; a loss that counts has no need of shares.
        if not self._left or micro.scale == 1.0 or count is not None or loss is None:
            return
        if micro.index == 0:
            self._seen = []
        if micro.index != len(self._seen):
            return
        self._seen.append((map_tensors(torch.detach, outputs), target, micro.scale, float(loss)))
        if micro.index == micro.count - 1:
            self._left -= 1
            if len(self._seen) == micro.count:
                self._compare(micro)
            self._seen = []

    @torch.no_grad()
    def _compare(self, micro: Any) -> None:
        # The shares of a replica's rows make up less than a whole batch.
        shares = sum(share for *_, share, _ in self._seen)
        parts = sum(share * loss for *_, share, loss in self._seen) / shares
        try:
            outputs, targets = (_joined([part[n] for part in self._seen]) for n in (0, 1))
            whole = float(measured(self._loss_fn(outputs, targets))[0])
        except Exception:
            # Sequences of different lengths cannot be joined; and no loss must fail on what is only a look.
            return
        if math.isclose(whole, parts, rel_tol=1e-3, abs_tol=1e-6):
            return
        self._left = 0
        told = (
            f"the loss of batch {micro.batch} is {whole:.6g}, but its {micro.count} micro-batches, weighed by their "
            f"samples, give {parts:.6g}: loss_fn is a mean over something else than samples (tokens that are not "
            "padding?), so the gradient differs from that of the batch. Let loss_fn return (sum, count): then "
            "micro-batches weigh by what they count"
        )
        log.warning("%s", told)
        self.news.append(told)


def _joined(parts: list[Tree]) -> Any:
    taken = [flatten(part) for part in parts]
    columns = zip(*(tensors for tensors, _ in taken), strict=True)
    return unflatten(taken[0][1], [torch.cat(column) for column in columns])
