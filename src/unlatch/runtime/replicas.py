"""What stations of a replicated network do beside their usual work: share rows out, sum losses and gradients.

Each replica, a column, takes the rows that it is given for a micro-batch of its own, with its share as weight. So
whatever micro-batches add up to, columns add up to as well: `schedule/replicated.py` says at which points.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, DataError
from ..nn.tree import aligned, map_tensors, split_batch
from ..schedule import SHARE_ROWS, Kind, giving, taking
from ..transport.mail import Micro
from .station import Operation, Station
from .updating import Updater

__all__ = ["Columns", "GradientSum"]

#: What a column tells the others: gradients as one tensor per dtype, and the parameters that have none.
Told = tuple[list[Tensor], list[int]]


@dataclass(frozen=True)
class Columns:
    """The replicas of a network.

    **Arguments:**

    - `count`: how many there are.
    - `mean_loss`: whether the loss is a mean over samples, so that columns weigh by their rows.

    >>> [Columns(3).rows(8, column) for column in range(3)], Columns(3).parts(8, 4)
    ([3, 3, 2], 2)
    """

    count: int = 1
    mean_loss: bool = True

    def rows(self, samples: int, column: int) -> int:
        """How many rows of a micro-batch a column is given."""
        return samples // self.count + (column < samples % self.count)

    def share(self, micro: Micro, column: int) -> float:
        """What the loss of a column's rows counts in that of the micro-batch."""
        return self.rows(micro.size, column) / micro.size if self.mean_loss else 1.0

    def parts(self, samples: int, microbatches: int) -> int:
        """Into how many micro-batches a batch is cut: every column gets a row of each."""
        if self.count == 1:
            return microbatches
        if samples < self.count:
            raise DataError(
                f"a batch of {samples} sample(s) cannot be shared out among {self.count} replicas: expected at least "
                f"{self.count}; leave a short last batch out (drop_last=True), or train fewer replicas"
            )
        return min(microbatches, samples // self.count)

    def operations(self, station: Station) -> Mapping[Kind, Operation]:
        """All that a station does, for each kind of entry."""
        usual = station.operations()
        if self.count == 1:
            return usual
        found = {kind: self._with_own_rows(station.column, work) for kind, work in usual.items()}
        for kind in usual:
            updaters = station.applied(kind)
            if updaters is not None:
                summing = GradientSum(updaters, station.column, self.count)
                found[giving(kind)], found[taking(kind)] = summing.give, summing.take
            if kind.cost == "forward":
                found[giving(kind)] = functools.partial(self._tell_loss, station)
                found[taking(kind)] = functools.partial(self._hear_loss, station)
        if station.number == 0:
            found[SHARE_ROWS] = self._share_out
        return found

    def _with_own_rows(self, column: int, work: Operation) -> Operation:
        """Work on the rows of a column as on a micro-batch of its own."""

        @functools.wraps(work)
        def operation(micro: Micro, *taken: Any) -> Sequence[Any]:
            share = self.share(micro, column)
            own = replace(micro, size=self.rows(micro.size, column), scale=micro.scale * share)
            return work(own, *taken)

        return operation

    def _share_out(self, micro: Micro, arrived: Any) -> Sequence[Any]:
        own, *others = [map_tensors(aligned, piece) for piece in split_batch(arrived, self.count)]
        # The caller may use its memory for the next batch before these have left the process.
        return [own, *(map_tensors(Tensor.clone, piece) for piece in others)]

    def _tell_loss(self, station: Station, micro: Micro) -> Sequence[Any]:
        assert station.stage is not None
        # Columns weigh each other's losses on the host, so on a device it is read for every micro-batch.
        return [(float(station.stage.loss), station.stage.count)] * self.count

    def _hear_loss(self, station: Station, micro: Micro, *told: tuple[float, float | None]) -> Sequence[Any]:
        """Let all know the loss of all columns, in place of that of this one."""
        counts = [count for _, count in told if count is not None]
        if counts:
            whole = sum(counts)
            total = sum(loss * (count or 0.0) for loss, count in told) / (whole or 1.0)
            station.counts[micro.id] = whole
        else:
            total = sum(self.share(micro, column) * loss for column, (loss, _) in enumerate(told))
        station.losses[micro.id] = total
        return ()


class GradientSum:
    """Gradients of one place in the network, summed over its replicas, alike in all of them to the last bit.

    **Arguments:** `updaters`: whose gradients; `column`, `columns`: which replica of how many this is.
    """

    def __init__(self, updaters: Sequence[Updater], column: int, columns: int) -> None:
        self._params = [p for updater in updaters for p in updater.params]
        self._names = [name for updater in updaters for name in updater.place.names]
        self._column, self._columns = column, columns
        self._own: Told = [], []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, p in enumerate(self._params):
            by_dtype.setdefault(p.dtype, []).append(number)
        self._buckets = list(by_dtype.values())

    def give(self, micro: Micro) -> Sequence[Any]:
        """Tell all other columns."""
        for name, p in zip(self._names, self._params, strict=True):
            if p.grad is not None and p.grad.is_sparse:
                raise ConfigError(
                    f"the gradient of {name} is sparse, and replicas sum dense ones: build the layer with sparse=False"
                )
        flat = [torch.cat([self._gradient(number) for number in bucket]) for bucket in self._buckets]
        self._own = flat, [number for number, p in enumerate(self._params) if p.grad is None]
        return [self._own] * (self._columns - 1)

    def take(self, micro: Micro, *others: Told) -> Sequence[Any]:
        """Replace the gradients by the sum over all columns, in their order."""
        own, self._own = self._own, ([], [])
        flats, lacking = zip(*others[: self._column], own, *others[self._column :], strict=True)
        nowhere = set(lacking[0]).intersection(*lacking)
        for bucket, parts in zip(self._buckets, zip(*flats, strict=True), strict=True):
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            sizes = [self._params[number].numel() for number in bucket]
            for number, gradient in zip(bucket, total.split(sizes), strict=True):
                p = self._params[number]
                p.grad = None if number in nowhere else gradient.view(p.shape)
        return ()

    def _gradient(self, number: int) -> Tensor:
        p = self._params[number]
        return (p.grad if p.grad is not None else torch.zeros_like(p)).detach().reshape(-1)
