"""The sum of gradients over replicas. Parts of them leave while the backward that completes them still runs.

A part is a port of the entry `U>` (see `schedule/replicated.py`), so that its message has room, is checked, simulated
and saved like any other; the entry gives what has not left before. Parts are made of parameters in the reverse of their
order in the stage, which is about the order in which their gradients become known, and are told by torch's hooks on
parameters. The last part waits for `U>`, and says whatever is to be said at the end:

- parameters without any gradient, which stay without one if no column has it. A part with such a parameter waits too.
- parts that changed after they had left, once more. A hook tells that a gradient was added to, not that nothing else
  will be: blocks may share a weight and go backward one by one, and methods may add to gradients themselves. So what
  had left is looked at again when it is the turn of `U>`. A part that was sent twice leaves early no more.

Which backward completes an update is for the schedule to know (`Replicated.completes`) and for the micro-batch
(`Micro.ends`). Where they do not, as in the rest of an accumulation, all parts wait for `U>`.

Elements are added in the order of the columns, whoever adds them, so all columns have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import ConfigError
from ..transport.mail import Micro
from .station import SENT, Operation
from .updating import Updater

__all__ = ["GradientSum"]

#: The gradients of a part, as one tensor per dtype.
Flats: TypeAlias = list[Tensor]


class _Left(NamedTuple):
    """A part that has left before its turn, and what it was made of."""

    flats: Flats
    gradients: list[Tensor]
    versions: list[int]


class GradientSum:
    """Gradients of one place in the network, summed over its replicas, alike in all of them to the last bit.

    **Arguments:**

    - `updaters`: whose gradients.
    - `column`, `columns`: which replica of how many this is.
    - `parts`: how many they travel in.
    """

    def __init__(self, updaters: Sequence[Updater], column: int, columns: int, parts: int = 1) -> None:
        self._params = [p for updater in updaters for p in updater.params]
        self._names = [name for updater in updaters for name in updater.place.names]
        self._column, self._columns = column, columns
        self._parts = _in_parts([p.nbytes for p in self._params], parts)
        self._by_dtype = [self._sorted(part) for part in self._parts]
        # Parts that changed after they had left.
        self._waiting: set[int] = set()
        self._left: dict[int, _Left] = {}
        self._left_for: Micro | None = None
        self._own: tuple[list[Flats], list[bool]] = [], []
        self._sums: list[Flats] = []
        self._nowhere: list[bool] = []

    def _sorted(self, numbers: Sequence[int]) -> list[list[int]]:
        found: dict[torch.dtype, list[int]] = {}
        for number in numbers:
            found.setdefault(self._params[number].dtype, []).append(number)
        return list(found.values())

    # ---------------------------------------------------------- parts that leave early

    def watching(self, work: Operation, send: Callable[[Micro, int, Any], None]) -> Operation:
        """The work that completes gradients, with parts of them on their way before it ends.

        **Arguments:** `send`: what the entry `U>` for a micro-batch gives through one of its ports.
        """

        @functools.wraps(work)
        def operation(micro: Micro, *taken: Any) -> Sequence[Any]:
            if not micro.ends:
                return work(micro, *taken)
            with self._watched(micro, send):
                return work(micro, *taken)

        return operation

    @contextmanager
    def _watched(self, micro: Micro, send: Callable[[Micro, int, Any], None]) -> Iterator[None]:
        self._left, self._left_for = {}, micro
        handles = []
        for part, numbers in enumerate(self._parts[:-1]):
            params = [self._params[number] for number in numbers]
            if part in self._waiting or not all(p.requires_grad for p in params):
                continue
            missing = set(numbers)

            def ready(_: Tensor, part: int, number: int, missing: set[int]) -> None:
                if missing:
                    missing.discard(number)
                    if not missing:
                        self._leave(part, micro, send)

            for number, p in zip(numbers, params, strict=True):
                hook = functools.partial(ready, part=part, number=number, missing=missing)
                handles.append(p.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _leave(self, part: int, micro: Micro, send: Callable[[Micro, int, Any], None]) -> None:
        flats = self._flats(part)
        gradients = self._gradients(part)
        self._left[part] = _Left(flats, gradients, [g._version for g in gradients])
        for position, other in enumerate(self._others):
            send(micro, position * len(self._parts) + part, self._for(other, flats))

    # --------------------------------------------------------------------- entries

    def give(self, micro: Micro) -> Sequence[Any]:
        """Tell all other columns what they were not told yet."""
        left = self._left if self._left_for == micro else {}
        self._left, self._left_for = {}, None
        changed = [part for part, before in left.items() if self._changed(part, before)]
        self._waiting.update(changed)
        kept = left.keys() - changed
        flats = [left[part].flats if part in kept else self._flats(part) for part in range(len(self._parts))]
        lacking = [p.grad is None for p in self._params]
        self._own = flats, lacking
        # As a tensor, on the host: numbers would make another form of each set of them, and too long a one of many.
        mask = torch.tensor(lacking, dtype=torch.uint8, device="cpu")
        given: list[Any] = []
        for other in self._others:
            given += [SENT if part in left else self._for(other, flats[part]) for part in range(len(flats) - 1)]
            again = [(part, self._for(other, flats[part])) for part in changed]
            given.append((self._for(other, flats[-1]), mask, again))
        return given

    def add(self, micro: Micro, *told: Any) -> Sequence[Any]:
        """Add up the share of this column, in the order of all, and tell the others."""
        self._sums = self._added(told)
        return [self._sums] * (self._columns - 1)

    def take_all(self, micro: Micro, *told: Any) -> Sequence[Any]:
        """Replace the gradients by the sum over two columns."""
        self._replace(self._added(told))
        return ()

    def take_sums(self, micro: Micro, *told: list[Flats]) -> Sequence[Any]:
        """Replace the gradients by what all columns have added up."""
        shares = (*told[: self._column], self._sums, *told[self._column :])
        self._sums = []
        self._replace([[torch.cat(pieces) for pieces in zip(*part, strict=True)] for part in zip(*shares, strict=True)])
        return ()

    # ------------------------------------------------------------------------ sums

    @property
    def _others(self) -> list[int]:
        return [column for column in range(self._columns) if column != self._column]

    def _for(self, column: int, flats: Flats) -> Flats:
        """What a column adds up: all of it if there are two, as they then send no more than shares of it and sums."""
        if self._columns == 2:
            return flats
        return [flat.tensor_split(self._columns)[column] for flat in flats]

    def _added(self, told: Sequence[Any]) -> list[Flats]:
        """The sum of what all columns have told this one, in their order."""
        own, lacking = self._own
        self._own = [], []
        count, columns = len(self._parts), []
        for first in range(0, len(told), count):
            *parts, (last, lacks, again) = told[first : first + count]
            parts.append(last)
            for part, flats in again:
                parts[part] = flats
            columns.append((parts, lacks.tolist()))
        columns.insert(self._column, ([self._for(self._column, flats) for flats in own], lacking))
        self._nowhere = [all(lacks) for lacks in zip(*(lacks for _, lacks in columns), strict=True)]
        return [
            [_sum(pieces) for pieces in zip(*flats, strict=True)]
            for flats in zip(*(parts for parts, _ in columns), strict=True)
        ]

    def _replace(self, sums: Sequence[Flats]) -> None:
        for groups, flats in zip(self._by_dtype, sums, strict=True):
            for numbers, flat in zip(groups, flats, strict=True):
                sizes = [self._params[number].numel() for number in numbers]
                for number, gradient in zip(numbers, torch.split(flat, sizes), strict=True):
                    p = self._params[number]
                    p.grad = None if self._nowhere[number] else gradient.view(p.shape)

    # ------------------------------------------------------------------- gradients

    def _flats(self, part: int) -> Flats:
        return [torch.cat([self._flat(number) for number in numbers]) for numbers in self._by_dtype[part]]

    def _flat(self, number: int) -> Tensor:
        p = self._params[number]
        if p.grad is None:
            return torch.zeros_like(p).detach().reshape(-1)
        if p.grad.is_sparse:
            raise ConfigError(
                f"the gradient of {self._names[number]} is sparse, and replicas sum dense ones: build the layer with "
                "sparse=False"
            )
        return p.grad.detach().reshape(-1)

    def _gradients(self, part: int) -> list[Tensor]:
        found = (self._params[number].grad for number in self._parts[part])
        return [g for g in found if g is not None]

    def _changed(self, part: int, before: _Left) -> bool:
        now = self._gradients(part)
        same = len(now) == len(before.gradients) and all(a is b for a, b in zip(now, before.gradients, strict=True))
        return not same or [g._version for g in now] != before.versions


def _in_parts(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Positions in `count` parts of about equal size, the last ones first."""
    whole, before, part = max(1, sum(sizes)), 0, 0
    parts: list[list[int]] = [[] for _ in range(count)]
    for position in reversed(range(len(sizes))):
        # None is left out because of a large one before it.
        part = min(count - 1, before * count // whole, part + bool(parts[part]))
        parts[part].append(position)
        before += sizes[position]
    return parts


def _sum(pieces: Sequence[Tensor]) -> Tensor:
    total = pieces[0] + pieces[1]
    for piece in pieces[2:]:
        total += piece
    return total
