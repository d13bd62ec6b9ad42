"""What follows from the order alone: which weights each action sees, and how much is under way at most."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .entries import Action, Route, Schedule
from .runs import Streams, by_station, resolved
from .validity import check_schedule, interleave

__all__ = ["Buffers", "buffers", "staleness", "steady_buffers", "versions"]


#: An update at which every warm-up is over.
_LATE = 10**6
#: Batches that show exceptions which come regularly.
_EXCEPTIONS = 16


def versions(streams: Streams) -> dict[Action, int]:
    """Give, for every action, how many updates its station has made before.

    >>> from .entries import Kind
    >>> from .periodic import ticked
    >>> from .runs import streams
    >>> seen = versions(streams(ticked(2), [1] * 4))
    >>> seen[Action(Kind.F, 0, 3)], seen[Action(Kind.B, 0, 3)]
    (1, 3)
    """
    made: Counter[int] = Counter()
    seen: dict[Action, int] = {}
    for stream in streams:
        for action in stream:
            seen[action] = made[action.station]
            if action.kind.cost == "update":
                made[action.station] += 1
    return seen


def staleness(schedule: Schedule, stage: int, micro: int, group: int | Sequence[int] = 1) -> int:
    """Count the updates that `stage` makes between the forward and the backward of a micro-batch, in closed form.

    A backward sees as many updates as there are whole groups before its own, whatever the schedule; a forward as many
    as there are whole groups among the backwards done before it.

    **Arguments:**

    - `micro`: the micro-batch, counted from when the pipeline was last empty.
    - `group`: micro-batches per update, or the number of each update in turn where they differ.

    >>> from .periodic import ticked
    >>> [staleness(ticked(3), stage, 20) for stage in range(3)]
    [4, 2, 0]
    >>> [staleness(ticked(3), 0, micro, group=3) for micro in range(20, 23)]
    [1, 2, 1]
    """
    if schedule.flushes:
        return 0
    done = schedule.finished(stage, micro)
    if isinstance(group, int):
        return micro // group - done // group
    ends = list(accumulate(group))
    return bisect_right(ends, micro) - bisect_right(ends, done)


@dataclass(frozen=True)
class Buffers:
    """Largest numbers under way at any moment.

    **Arguments:**

    - `in_flight`: per station, micro-batches between the start of their forward and their last gradient; 0 where a
      station does not do both.
    - `room`: per route, messages sent and not yet taken up, if the receiver is as slow as the schedule lets it be. A
      transport with that many slots never makes a sender wait.
    """

    in_flight: tuple[int, ...]
    room: Mapping[Route, int]


def buffers(streams: Streams) -> Buffers:
    """Count what is under way, whatever the timing. The streams must pass `check`.

    >>> from .periodic import ticked
    >>> from .runs import streams
    >>> found = buffers(streams(ticked(3), [1] * 9))
    >>> found.in_flight, found.room["forward", 0, 1], found.room["backward", 2, 1]
    ((5, 3, 1), 5, 3)
    """
    stations = by_station(resolved(streams))
    return Buffers(tuple(_in_flight(stream) for stream in stations), _room(stations))


def steady_buffers(schedule: Schedule, microbatches: int = 1, accumulate: int = 1) -> Buffers:
    """The buffers of a run that is long enough to show the most; a schedule that cannot be executed is refused.

    Where entries depend on the batch, a run at the beginning, one with new samples and one much later are looked at.

    **Arguments:** `microbatches`, `accumulate`: parts of a batch, and batches per update.

    >>> from .periodic import ticked
    >>> steady_buffers(ticked(3)).in_flight
    (5, 3, 1)
    """
    # Long enough that the pipeline is full and every update and every second batch of a kind has been seen.
    batches = max(2 * accumulate, -(-2 * (schedule.depth + 1) // microbatches), 2)
    conditional = any(entry.when is not None for entry in schedule.entries)
    groups = [microbatches] * (max(batches, _EXCEPTIONS) if conditional else batches)
    found = [buffers(check_schedule(schedule, groups, accumulate))]
    if conditional:
        # What is done only for new samples, or only after a warm-up.
        found.append(buffers(check_schedule(schedule, groups, accumulate, fresh=lambda batch: True)))
        found.append(buffers(check_schedule(schedule, groups, accumulate, first=_LATE)))
    return Buffers(
        tuple(max(counts) for counts in zip(*(one.in_flight for one in found), strict=True)),
        {route: max(one.room.get(route, 0) for one in found) for one in found for route in one.room},
    )


def _in_flight(stream: Sequence[Action]) -> int:
    closing: dict[int, int] = {}
    for position, action in enumerate(stream):
        if action.kind.cost in ("backward", "weight gradient"):
            closing[action.micro] = position
    now = most = 0
    for position, action in enumerate(stream):
        if action.kind.cost == "forward" and action.micro in closing:
            now += 1
            most = max(most, now)
        elif closing.get(action.micro) == position:
            now -= 1
    return most


def _room(stations: Sequence[Sequence[Action]]) -> dict[Route, int]:
    """Messages that can pile up on every route.

    All that a sender can know of a receiver came with the messages it has taken, from whomever: at least what the
    receiver had done by then is done. Nothing else holds the receiver to anything, so the rest may still lie there. A
    vector clock per station (how many actions of each other one are known to be done) tells exactly that.
    """
    clocks = [[0] * len(stations) for _ in stations]
    under_way: dict[Route, list[list[int]]] = {}
    # Per route: the position of the receiver after each take, and how many were sent.
    taken_at: dict[Route, list[int]] = {}
    room: Counter[Route] = Counter()
    sent: Counter[Route] = Counter()
    sends: dict[Route, list[tuple[int, int]]] = {}
    for action in interleave(stations):
        assert action.entry is not None
        own = clocks[action.station]
        for route in action.entry.incoming:
            own[:] = map(max, own, under_way[route].pop(0))
        own[action.station] += 1
        for route in action.entry.incoming:
            taken_at.setdefault(route, []).append(own[action.station])
        for route in action.entry.outgoing:
            sent[route] += 1
            sends.setdefault(route, []).append((sent[route], own[route[2]]))
            under_way.setdefault(route, []).append(list(own))
    for route, moments in sends.items():
        takes = taken_at.get(route, [])
        room[route] = max(count - bisect_right(takes, known) for count, known in moments)
    return dict(room)
