"""What leaves one device of the plan for another in fewer bytes, and what arrives there: in every executor alike.

A message is rounded because of where the plan puts its sender and receiver, not because of which processes they are in.
So one process with all stations computes, bit for bit, what many processes compute.

Only states and their gradients are rounded, as far as a station says so of its messages (`Station.roundable`). What is
beside them stays as it is: targets, integers, tensors with a single number, and tensors with the shape of a weight that
stages share, which is most likely that weight, or its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..nn.tree import Tree, flatten, unflatten
from ..schedule import OUTSIDE, Entry
from ..transport.mail import Micro
from ..transport.rounding import Format, Residue, in_bf16, in_int8, restored
from .station import Operation, Roundable, Station

__all__ = ["Compression"]


class Compression:
    """Rounds the messages of one process, and keeps what rounding took.

    **Arguments:**

    - `messages`: the format.
    - `placed`: the device of each station, as the plan has it.
    - `exact_shapes`: of tensors that are never rounded.
    """

    def __init__(self, messages: Format, placed: Sequence[int], exact_shapes: Collection[tuple[int, ...]] = ()) -> None:
        self.messages = messages
        self._placed, self._exact_shapes = placed, frozenset(exact_shapes)
        #: By sender, name and receiver.
        self._edges: dict[tuple[int, str, int], _Edge] = {}

    def around(self, station: Station, entry: Entry, work: Operation) -> Operation:
        """What a station does for an entry, between what arrives and what leaves."""
        arriving = [sender != OUTSIDE and self._apart(sender, station.number) for _, sender in entry.takes]
        leaving = [self._edge(station, name, receiver) for name, receiver in entry.gives]
        if not any(arriving) and not any(leaving):
            return work

        @functools.wraps(work)
        def operation(micro: Micro, *taken: Any) -> Sequence[Any]:
            opened = [restored(one) if far else one for one, far in zip(taken, arriving, strict=True)]
            given = work(micro, *opened)
            return [edge.rounded(one) if edge else one for one, edge in zip(given, leaving, strict=True)]

        return operation

    def _edge(self, station: Station, name: str, receiver: int) -> _Edge | None:
        part = station.roundable(name)
        if part == "nothing" or not self._apart(station.number, receiver):
            return None
        # Entries that exclude each other may give the same message.
        made = _Edge(self.messages, part, self._exact_shapes)
        return self._edges.setdefault((station.number, name, receiver), made)

    def _apart(self, one: int, other: int) -> bool:
        return self._placed[one] != self._placed[other]

    def forget(self) -> None:
        """Begin anew."""
        for edge in self._edges.values():
            edge.residues = []

    def state(self, station: int) -> dict[str, Any]:
        """What rounding took from the messages of a station, as a tree of the tensors in use."""
        found: dict[str, Any] = {}
        for (sender, name, receiver), edge in self._edges.items():
            if sender == station:
                found.setdefault(name, {})[receiver] = [residue.rows for residue in edge.residues]
        return found

    def load(self, station: int, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. The tensors are used as they are."""
        for (sender, name, receiver), edge in self._edges.items():
            if sender == station:
                edge.residues = [Residue(rows) for rows in state[name][receiver]]


class _Edge:
    """All messages of one name from one station to another."""

    def __init__(self, messages: Format, part: Roundable, exact_shapes: frozenset[tuple[int, ...]]) -> None:
        self._bf16, self._part, self._exact_shapes = messages == "bf16", part, exact_shapes
        #: One for each tensor of a message, as far as any were rounded.
        self.residues: list[Residue] = []

    def rounded(self, payload: Tree) -> Tree:
        if self._part == "first":
            first, *others = payload
            return (self._tree(first), *others)
        return self._tree(payload)

    def _tree(self, tree: Tree) -> Tree:
        tensors, structure = flatten(tree)
        self.residues += [Residue() for _ in range(len(tensors) - len(self.residues))]
        found = [self._leaf(t, residue) for t, residue in zip(tensors, self.residues, strict=False)]
        return unflatten(structure, found)

    def _leaf(self, t: Tensor, residue: Residue) -> Tree:
        bytes_after = 2 if self._bf16 else 1
        if not t.is_floating_point() or t.itemsize <= bytes_after or t.numel() < 2 or t.shape in self._exact_shapes:
            return t
        return in_bf16(t) if self._bf16 else in_int8(t, residue)
