"""The order in which ranks post sends and receives of device tensors, as a model that can be searched to its end.

The rules are those of NCCL as `docs/devices.md` tells them: for each pair of ranks and group there is one stream on
either side, in which operations wait for each other in the order in which they were posted; a send is over when the
receive of the other side is. Headers travel another way (gloo) and need nobody's consent.

A rank has an engine, which does what its schedule says and waits for messages; and for each neighbour a sender, which
posts one send after the other, and a receiver. In any order whatsoever one of them takes its next step; `stuck` goes
through all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from unlatch.schedule import OUTSIDE, Schedule, streams

Way = tuple[int, int]


@dataclass(frozen=True)
class Order:
    """How messages are exchanged.

    **Arguments:**

    - `groups`: for each pair of ranks `"one"`, or one `"per direction"`.
    - `receives`: posted `"always"`, the next one as soon as the last is over; or `"after the header"` has come.
    """

    groups: Literal["one", "per direction"]
    receives: Literal["always", "after the header"]

    def group(self, way: Way) -> Any:
        return way if self.groups == "per direction" else (min(way), max(way))


class State(NamedTuple):
    """Everything that can differ: all parts are in the order of ranks, ways and streams."""

    done: tuple[int, ...]  # by rank: entries of the schedule
    waiting: tuple[int, ...]  # by way: messages that the engine has handed to the sender
    sending: tuple[bool, ...]  # by way: whether the sender waits for a send
    headers: tuple[int, ...]  # by way: headers that have come and were not read
    receiving: tuple[bool, ...]  # by way: whether the receiver waits for a receive
    mail: tuple[int, ...]  # by way: messages that have come over the run
    posted: tuple[tuple[tuple[str, int], ...], ...]  # by stream: ("send" or "receive", way), in their order


class Model:
    """A run of a schedule in which each rank has one station.

    **Arguments:** `micros`: micro-batches; all of one batch where the schedule empties the pipeline after each.
    """

    def __init__(self, schedule: Schedule, micros: int, order: Order) -> None:
        self.order = order
        self.lists = streams(schedule, [micros] if schedule.flushes else [1] * micros)
        ways: set[Way] = set()
        # For each entry: how many messages of each way must have come, and which ways it sends over.
        taken: dict[Way, int] = {}
        self.needs: list[list[tuple[dict[Way, int], list[Way]]]] = []
        for rank, actions in enumerate(self.lists):
            listed = []
            for action in actions:
                assert action.entry is not None
                for port in action.entry.takes:
                    if port.station not in (OUTSIDE, rank):
                        way = (port.station, rank)
                        taken[way] = taken.get(way, 0) + 1
                gives = [(rank, port.station) for port in action.entry.gives if port.station != rank]
                ways.update(gives)
                needed = {way: count for way, count in taken.items() if way[1] == rank}
                listed.append((needed, gives))
            self.needs.append(listed)
        self.ways = sorted(ways)
        self.total = [taken.get(way, 0) for way in self.ways]
        self.number = {way: n for n, way in enumerate(self.ways)}
        self.streams = sorted({(rank, order.group(way)) for way in self.ways for rank in way})
        self.stream = {name: n for n, name in enumerate(self.streams)}

    def first(self) -> State:
        none, no = (0,) * len(self.ways), (False,) * len(self.ways)
        return State((0,) * len(self.lists), none, no, none, no, none, ((),) * len(self.streams))

    def finished(self, s: State) -> bool:
        return all(n == len(one) for n, one in zip(s.done, self.lists, strict=True)) and s.mail == tuple(self.total)

    def next(self, s: State) -> list[State]:
        """Every state that is one step away."""
        found = [after for rank in range(len(self.lists)) for after in self._engine(s, rank)]
        for n, way in enumerate(self.ways):
            found += self._sender(s, n, way)
            found += self._receiver(s, n, way)
            found += self._exchange(s, n, way)
        return found

    def _engine(self, s: State, rank: int) -> list[State]:
        if s.done[rank] == len(self.lists[rank]):
            return []
        needed, gives = self.needs[rank][s.done[rank]]
        if any(s.mail[self.number[way]] < count for way, count in needed.items()):
            return []
        waiting = s.waiting
        for way in gives:
            waiting = _with(waiting, self.number[way], waiting[self.number[way]] + 1)
        return [s._replace(done=_with(s.done, rank, s.done[rank] + 1), waiting=waiting)]

    def _sender(self, s: State, n: int, way: Way) -> list[State]:
        """The tensor is there (its event was waited for): tell the peer, and post the send."""
        if s.sending[n] or not s.waiting[n]:
            return []
        at = self.stream[way[0], self.order.group(way)]
        return [
            s._replace(
                waiting=_with(s.waiting, n, s.waiting[n] - 1),
                sending=_with(s.sending, n, True),
                headers=_with(s.headers, n, s.headers[n] + 1),
                posted=_with(s.posted, at, (*s.posted[at], ("send", n))),
            )
        ]

    def _receiver(self, s: State, n: int, way: Way) -> list[State]:
        told = s.headers[n] > 0 if self.order.receives == "after the header" else s.mail[n] < self.total[n]
        if s.receiving[n] or not told:
            return []
        at = self.stream[way[1], self.order.group(way)]
        # Who does not wait for headers reads them when the payload is there.
        headers = _with(s.headers, n, s.headers[n] - 1) if self.order.receives == "after the header" else s.headers
        posted = _with(s.posted, at, (*s.posted[at], ("receive", n)))
        return [s._replace(headers=headers, receiving=_with(s.receiving, n, True), posted=posted)]

    def _exchange(self, s: State, n: int, way: Way) -> list[State]:
        """A send and its receive meet, both at the heads of their streams."""
        out, into = (self.stream[rank, self.order.group(way)] for rank in way)
        if s.posted[out][:1] != (("send", n),) or s.posted[into][:1] != (("receive", n),):
            return []
        posted = _with(_with(s.posted, out, s.posted[out][1:]), into, s.posted[into][1:])
        return [
            s._replace(
                sending=_with(s.sending, n, False),
                receiving=_with(s.receiving, n, False),
                mail=_with(s.mail, n, s.mail[n] + 1),
                posted=posted,
            )
        ]


def _with(values: tuple[Any, ...], n: int, value: Any) -> tuple[Any, ...]:
    return (*values[:n], value, *values[n + 1 :])


def stuck(model: Model) -> tuple[State | None, int]:
    """A state in which nobody can go on although not all is done, if there is one; and how many states there are."""
    start = model.first()
    seen, to_do = {start}, [start]
    while to_do:
        state = to_do.pop()
        after = model.next(state)
        if not after and not model.finished(state):
            return state, len(seen)
        for one in after:
            if one not in seen:
                seen.add(one)
                to_do.append(one)
    return None, len(seen)


def unclosed(orders: Sequence[Sequence[Way]]) -> set[Way]:
    """Groups that are never closed where each rank closes those of its own in an order, if that takes both ranks.

    **Arguments:** `orders`: by rank, the ways whose groups it closes. Which of those that can be is closed first does
    not matter: each rank waits for one of them at a time.
    """
    left = [list(order) for order in orders]
    while True:
        heads = {order[0] for order in left if order}
        over = [way for way in heads if all(left[rank][:1] == [way] for rank in way)]
        if not over:
            return {way for order in left for way in order}
        for rank in over[0]:
            left[rank].pop(0)


def strays(model: Model, steps: list[tuple[str, Way]]) -> str:
    """Where recorded steps of senders (`"send"`), receivers (`"receive"`) and streams (`"over"`) leave the model.

    What engines do is not recorded: they go on as far as a send needs, if the model lets them.

    **Returns:** what is wrong; nothing if all of it is a way through the model to its end.
    """
    state = model.first()
    for number, (what, way) in enumerate(steps):
        n = model.number[way]
        if what == "send":
            while not state.waiting[n] and (after := model._engine(state, way[0])):
                state = after[0]
        moves = {"send": model._sender, "receive": model._receiver, "over": model._exchange}
        after = moves[what](state, n, way)
        if not after:
            return f"step {number}, {what} {way}, is not allowed in {state}"
        state = after[0]
    for rank in range(len(model.lists)):
        while after := model._engine(state, rank):
            state = after[0]
    return "" if model.finished(state) else f"it ends in {state}"
