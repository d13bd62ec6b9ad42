"""A whole finite run of a schedule: all batches fed, the pipeline emptied at the end.

Every pass works on *streams*: for each device the list of what it does, in order. A device usually holds one station;
with `devices` several stations share one, and their actions keep the schedule's global order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate as running_sum
from typing import NamedTuple

from ..errors import ScheduleError
from .entries import Action, Schedule, chain_entry

__all__ = [
    "Streams",
    "by_station",
    "excerpt",
    "moments",
    "place",
    "resolved",
    "station_devices",
    "streams",
    "unroll",
    "update_ends",
]

Streams = Sequence[Sequence[Action]]
_REACH = 5


class _Facts(NamedTuple):
    """A micro-batch, as far as entries may depend on it."""

    batch: int
    update: int
    ends: bool
    fresh: bool


def update_ends(groups: Sequence[int], accumulate: int = 1) -> dict[int, int]:
    """Number the updates by the last micro-batch of each.

    **Arguments:**

    - `groups`: number of micro-batches of each batch.
    - `accumulate`: batches per update; what is left over at the end makes a last, smaller update.

    >>> update_ends([2, 2, 2], accumulate=2)
    {3: 0, 5: 1}
    """
    if accumulate < 1 or not groups or min(groups) < 1:
        raise ScheduleError(
            f"expected at least one batch, one micro-batch in each and one batch per update, "
            f"got micro-batches {list(groups)} and accumulate={accumulate}"
        )
    totals = list(running_sum(groups))
    ends = totals[accumulate - 1 :: accumulate]
    if not ends or ends[-1] != totals[-1]:
        ends.append(totals[-1])
    return {end - 1: number for number, end in enumerate(ends)}


def moments(
    groups: Sequence[int], accumulate: int = 1, fresh: Callable[[int], bool] | None = None, first: int = 0
) -> list[_Facts]:
    """What entries may depend on, for every micro-batch of a run. An incomplete accumulation at its end has no end.

    **Arguments:**

    - `fresh`: whether a batch holds samples that were not met before; by default none does.
    - `first`: updates that were made before the run, which begins with an empty pipeline.
    """
    update_ends(groups, accumulate)  # refuses runs without batches
    found: list[_Facts] = []
    for batch, count in enumerate(groups):
        update, place = divmod(batch, accumulate)
        new = fresh is not None and fresh(batch)
        for index in range(count):
            ends = place == accumulate - 1 and index == count - 1
            found.append(_Facts(first * accumulate + batch, first + update, ends, new))
    return found


def unroll(
    schedule: Schedule,
    groups: Sequence[int],
    accumulate: int = 1,
    fresh: Callable[[int], bool] | None = None,
    first: int = 0,
) -> Iterator[Action]:
    """Yield the global order of a run over batches of `groups` micro-batches, updates and drain included.

    What is left over of an accumulation is applied when all else is done.

    >>> from .periodic import ticked
    >>> " ".join(map(str, unroll(ticked(2), [1, 1])))
    '0F0 1F0 1B0 1U0 0F1 1F1 1B1 1U1 0B0 0U0 0B1 0U1'
    """
    facts = moments(groups, accumulate, fresh, first)
    entries = schedule.entries
    always = [entry.when is None and entry.per == "micro" for entry in entries]

    def fed_and_drained() -> Iterator[tuple[int, int]]:
        fed = 0
        for count in groups:
            yield from schedule.feed(fed, count)
            fed += count
        yield from schedule.drain(fed)

    for number, micro in fed_and_drained():
        entry = entries[number]
        if always[number] or entry.due(facts[micro]):
            yield Action.of(entry, micro, facts[micro].update if entry.per == "update" else micro)
    if not facts[-1].ends:
        last = facts[-1]._replace(ends=True)
        for entry in entries:
            if entry.per == "update" and entry.due(last):
                yield Action.of(entry, len(facts) - 1, last.update)


def place(order: Iterable[Action], devices: Sequence[int]) -> list[list[Action]]:
    """Hand each action of a global order to the device of its station.

    **Arguments:**

    - `devices`: for each station, the number of its device.

    >>> from .periodic import ticked
    >>> [len(stream) for stream in place(unroll(ticked(3), [2]), [0, 0, 1])]
    [10, 5]
    """
    result: list[list[Action]] = [[] for _ in range(max(devices) + 1)]
    receivers = [result[device].append for device in devices]
    for action in order:
        receivers[action.station](action)
    return result


def streams(
    schedule: Schedule,
    groups: Sequence[int],
    accumulate: int = 1,
    devices: Sequence[int] | None = None,
    fresh: Callable[[int], bool] | None = None,
    first: int = 0,
) -> list[list[Action]]:
    """Give what each station (or each device) does in a whole run, in order.

    **Arguments:**

    - `groups`: number of micro-batches of each batch.
    - `accumulate`: batches per update.
    - `devices`: for each station the number of its device; by default every station has its own.
    - `fresh`, `first`: as in `moments`.

    >>> from .periodic import ticked
    >>> [" ".join(map(str, stream)) for stream in streams(ticked(2), [1, 1])]
    ['0F0 0F1 0B0 0U0 0B1 0U1', '1F0 1B0 1U0 1F1 1B1 1U1']
    """
    return place(unroll(schedule, groups, accumulate, fresh, first), devices or range(schedule.stations))


def resolved(streams: Streams) -> Streams:
    """The same streams with the entries of a chain where an action does not know its own."""
    if all(action.entry is not None for stream in streams for action in stream):
        return streams
    stages = 1 + max(action.station for stream in streams for action in stream)
    kinds = {(action.kind, action.station) for stream in streams for action in stream}
    entries = {key: chain_entry(*key, stages) for key in kinds}
    return [[Action.of(entries[a.kind, a.station], a.batch, a.batch) for a in stream] for stream in streams]


def station_devices(streams: Streams) -> list[int]:
    """Find, for each station, the stream it is in; a station in two streams or in none is an error."""
    home: dict[int, int] = {}
    for number, stream in enumerate(streams):
        for station in {action.station for action in stream}:
            if home.setdefault(station, number) != number:
                raise ScheduleError(
                    f"station {station} is in streams {home[station]} and {number}: expected all its actions in one "
                    "stream"
                )
    if sorted(home) != list(range(len(home))) or not home:
        raise ScheduleError(f"expected stations numbered from 0 without gaps, got {sorted(home)}")
    return [home[station] for station in range(len(home))]


def by_station(streams: Streams) -> list[list[Action]]:
    """Split streams of devices into streams of stations."""
    stations: list[list[Action]] = [[] for _ in station_devices(streams)]
    for stream in streams:
        for action in stream:
            stations[action.station].append(action)
    return stations


def excerpt(streams: Streams, marks: dict[int, int], name: str = "stream") -> str:
    """Show the surroundings of `marks` (stream number to position), the position itself in brackets.

    >>> from .entries import Kind
    >>> print(excerpt([[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]], {0: 1}))
      stream 0:  0F0 [0B0]
    """
    return "\n".join(f"  {name} {number}:  {_window(streams[number], at)}" for number, at in sorted(marks.items()))


def _window(stream: Sequence[Action], at: int) -> str:
    start, stop = max(0, at - _REACH), min(len(stream), at + _REACH + 1)
    shown = [f"[{stream[i]}]" if i == at else str(stream[i]) for i in range(start, stop)]
    return " ".join(["..."] * (start > 0) + shown + (["..."] if stop < len(stream) else ["[end]"] * (at >= stop)))
