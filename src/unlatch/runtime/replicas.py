"""What stations of a replicated network do beside their usual work: share rows out, sum losses and gradients.

Each replica, a column, takes the rows that it is given for a micro-batch of its own, with its share as weight. So
whatever micro-batches add up to, columns add up to as well: `schedule/replicated.py` says at which points.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import DataError
from ..nn.tree import aligned, map_tensors, split_batch
from ..schedule import SHARE_ROWS, Kind, Replicated, Schedule, adding, giving, taking
from ..transport.mail import Message, Micro
from .gradient_sum import GradientSum
from .station import Operation, Station

__all__ = ["Columns"]


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

    def operations(
        self, station: Station, schedule: Schedule, send: Callable[[Message], None]
    ) -> Mapping[Kind, Operation]:
        """All that a station does, for each kind of entry.

        **Arguments:** `send`: takes messages that leave before it is the turn of the entry that lists them.
        """
        usual = station.operations()
        if self.count == 1:
            return usual
        assert isinstance(schedule, Replicated)
        found = {kind: self._with_own_rows(station.column, work) for kind, work in usual.items()}
        for kind in usual:
            found |= self._sums(station, kind, schedule, found, send)
            if kind.cost == "forward":
                found[giving(kind)] = functools.partial(self._tell_loss, station)
                found[taking(kind)] = functools.partial(self._hear_loss, station)
        if station.number == 0:
            found[SHARE_ROWS] = self._share_out
        return found

    def _sums(
        self,
        station: Station,
        kind: Kind,
        schedule: Replicated,
        known: Mapping[Kind, Operation],
        send: Callable[[Message], None],
    ) -> dict[Kind, Operation]:
        """What a station does to sum the gradients that an entry applies, if it applies any."""
        updaters, own = station.applied(kind), (giving(kind), station.number)
        entry = next((entry for entry in schedule.entries if (entry.kind, entry.station) == own), None)
        if updaters is None or entry is None:
            return {}
        summing = GradientSum(updaters, station.column, self.count, len(entry.gives) // (self.count - 1))
        found: dict[Kind, Operation] = {giving(kind): summing.give}
        if self.count == 2:
            found[taking(kind)] = summing.take_all
        else:
            found |= {adding(kind): summing.add, taking(kind): summing.take_sums}
        # Networks beside a stage learn at other times than it does.
        complete = None if kind in schedule.also else schedule.completes(kind, station.index)
        if complete is not None and complete in known:

            def send_part(micro: Micro, port: int, payload: Any) -> None:
                name, receiver = entry.gives[port]
                send(Message(name, receiver, micro, payload, station.version))

            found[complete] = summing.watching(known[complete], send_part)
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
