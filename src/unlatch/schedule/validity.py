"""Is it a schedule? Everything once, in an order that small buffers can execute, and the same updates everywhere.

Whether streams can get stuck is found by letting every one of them run as far as its messages allow. An action waits
only for messages that it takes, and for room on the routes that it gives to. Messages of a route arrive in the order
they were sent, so the newest micro-batch that passed says everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..errors import ScheduleError
from .entries import Action, Entry, Kind, Route, Schedule, chain_entry
from .runs import Streams, by_station, excerpt, place, resolved, station_devices, streams

__all__ = ["Progress", "check", "check_order", "check_schedule", "interleave"]

_CHAIN = {Kind.F, Kind.B, Kind.I, Kind.W, Kind.U}
# What every stage of a chain owes each micro-batch; a whole backward counts as both gradients.
_DUTIES = (
    ("forward", (Kind.F,), Kind.F),
    ("backward", (Kind.B, Kind.I), Kind.B),
    ("weight gradient", (Kind.B, Kind.W), Kind.W),
)
_GRADIENTS = ("backward", "weight gradient")


class Progress:
    """How far every route has come.

    **Arguments:**

    - `streams`: whose entries are known.
    - `slots`: messages that a route can hold; `None` is no limit, a mapping has one for each route. Stations of one
      stream share memory, so routes between them have no limit either.
    """

    def __init__(self, streams: Streams, slots: int | Mapping[Route, int] | None = None) -> None:
        home = station_devices(streams)
        self.slots: dict[Route, int | None] = {}
        self.newest: dict[Route, int] = {}
        self.sent: Counter[Route] = Counter()
        self.taken: Counter[Route] = Counter()
        self._givers: dict[Route, Kind] = {}
        self._takers: dict[Route, Kind] = {}
        self._under_way: dict[Route, list[int]] = {}
        for entry in {id(a.entry): a.entry for stream in streams for a in stream}.values():
            assert entry is not None
            for route in entry.incoming:
                self._takers[route] = entry.kind
            for route in entry.outgoing:
                self._givers[route] = entry.kind
        senders: dict[tuple[str, int], int] = {}
        for route in sorted({*self._takers, *self._givers}):
            _, sender, receiver = route
            if not (0 <= sender < len(home) and 0 <= receiver < len(home)):
                raise ScheduleError(f"message {route[0]!r} goes from station {sender} to {receiver}: no such station")
            if (other := senders.setdefault((route[0], receiver), sender)) != sender:
                raise ScheduleError(
                    f"station {receiver} takes a message {route[0]!r} from station {other} and one from {sender}: "
                    "messages of one name share a box, so give them two names"
                )
            limit = slots.get(route, 1) if isinstance(slots, Mapping) else slots
            self.slots[route] = None if home[sender] == home[receiver] else limit
            self.newest[route], self._under_way[route] = -1, []

    def blocker(self, action: Action) -> Action | None:
        """Give the action that must happen before `action` can; `None` if it is ready."""
        entry = action.entry
        assert entry is not None
        for route in entry.incoming:
            if self.newest[route] < action.micro:
                kind = self._givers.get(route)
                if kind is None:
                    raise ScheduleError(
                        f"{action} waits for message {route[0]!r} of station {route[1]}, which never sends one"
                    )
                return Action(kind, route[1], action.micro)
        for route in entry.outgoing:
            slots = self.slots[route]
            if slots is not None and self.sent[route] - self.taken[route] >= slots:
                oldest = self._under_way[route][0]
                return Action(self._takers.get(route, Kind("-")), route[2], oldest)
        return None

    def lacks_message(self, action: Action) -> bool:
        """Whether something that `action` takes has not been sent yet."""
        assert action.entry is not None
        return any(self.newest[route] < action.micro for route in action.entry.incoming)

    def finish(self, action: Action) -> bool:
        """Take note that `action` is done; tell whether another station may have waited for it."""
        entry = action.entry
        assert entry is not None
        for route in entry.incoming:
            name, sender, _ = route
            waiting = self._under_way[route]
            if not waiting:
                raise ScheduleError(f"{action} takes message {name!r} of station {sender}, which was taken before")
            if waiting[0] != action.micro:
                raise ScheduleError(
                    f"{action} takes message {name!r} of micro-batch {action.micro} from station {sender}, but that of "
                    f"{waiting[0]} comes next: one entry takes a message, and both sides must agree for which "
                    "micro-batches they are due"
                )
            self.taken[route] += 1
            waiting.pop(0)
        for route in entry.outgoing:
            self.newest[route] = action.micro
            self.sent[route] += 1
            self._under_way[route].append(action.micro)
        return bool(entry.takes or entry.gives)

    def unread(self) -> Route | None:
        """A route on which a message was left lying, if there is one."""
        return next((route for route, waiting in self._under_way.items() if waiting), None)


def interleave(streams: Streams, slots: int | Mapping[Route, int] | None = None) -> Iterator[Action]:
    """Yield all actions in an order in which the streams can really execute.

    Raises `ScheduleError` with the circle of waiting streams if they cannot. What a station does of one kind must be in
    the order of the micro-batches (`check` tells).

    >>> from .periodic import ticked
    >>> [str(a) for a in interleave(streams(ticked(2), [1]))]
    ['0F0', '1F0', '1B0', '1U0', '0B0', '0U0']
    """
    streams = resolved(streams)
    home = station_devices(streams)
    progress = Progress(streams, slots)
    blocker = progress.blocker
    position = [0] * len(streams)
    ready = list(reversed(range(len(streams))))
    stopped = [False] * len(streams)
    while ready:
        number = ready.pop()
        stopped[number] = True
        stream, at = streams[number], position[number]
        while at < len(stream) and blocker(action := stream[at]) is None:
            at += 1
            yield action
            if progress.finish(action):
                for other in _partners(action, home):
                    if stopped[other] and other != number:
                        stopped[other] = False
                        ready.append(other)
        position[number] = at
    if any(at < len(stream) for at, stream in zip(position, streams, strict=True)):
        raise ScheduleError(_standstill(streams, home, progress, position))
    if (route := progress.unread()) is not None:
        raise ScheduleError(f"station {route[2]} never takes a message {route[0]!r} that station {route[1]} sends it")


def _partners(action: Action, home: Sequence[int]) -> set[int]:
    """The streams that an action's messages may set going: who gets one, and whose message was taken."""
    assert action.entry is not None
    receivers = {home[receiver] for _, _, receiver in action.entry.outgoing}
    return receivers | {home[sender] for _, sender, _ in action.entry.incoming}


def _standstill(streams: Streams, home: Sequence[int], progress: Progress, position: Sequence[int]) -> str:
    """Follow who waits for whom until a stream comes up twice, or one that will never send."""
    number = next(n for n, stream in enumerate(streams) if position[n] < len(stream))
    told: dict[int, str] = {}
    while number not in told and position[number] < len(streams[number]):
        action = streams[number][position[number]]
        needed = progress.blocker(action)
        assert needed is not None, "a stream at a standstill waits for something"
        why = "" if progress.lacks_message(action) else " to make room"
        told[number] = f"  stream {number} stands before {action} and waits for {needed}{why}"
        number = home[needed.station]
    head = "the streams wait for each other in a circle" if number in told else f"stream {number} ended too early"
    limits = {slots for slots in progress.slots.values() if slots is not None}
    most = f" with {limits.pop()} message(s) per route" if len(limits) == 1 else ""
    return "\n".join([f"{head}{most}:", *told.values(), excerpt(streams, {n: position[n] for n in {*told, number}})])


def check(streams: Streams, slots: int | Mapping[Route, int] | None = 1) -> None:
    """Raise `ScheduleError` unless the streams are a complete run that cannot get stuck.

    Every station does each of its entries once for every micro-batch for which it is due, in order, gradients after
    their forwards; every gradient is followed by an update, in a chain of the same micro-batches at all stages; and no
    station waits for ever.

    **Arguments:**

    - `streams`: what each device does, in order.
    - `slots`: messages under way that each route can hold before the sender must wait; `None` is no limit. What runs
      with one slot runs with any number.

    >>> from .periodic import ticked
    >>> check(streams(ticked(4), [2, 2, 2], accumulate=2))
    """
    if isinstance(slots, int) and slots < 1:
        raise ScheduleError(f"expected at least 1 message per route, got slots={slots}")
    if not any(streams):
        raise ScheduleError("the schedule has no forward and no backward at all")
    streams = resolved(streams)
    entries = {id(a.entry): a.entry for stream in streams for a in stream if a.entry is not None}
    _check(streams, slots, _is_chain(entries.values()))


def _check(streams: Streams, slots: int | Mapping[Route, int] | None, chain: bool) -> None:
    stations = by_station(streams)
    if chain:
        _check_chain(stations)
    else:
        for station, stream in enumerate(stations):
            _check_station(station, stream)
    for _ in interleave(streams, slots):
        pass


def check_schedule(
    schedule: Schedule,
    groups: Sequence[int],
    accumulate: int = 1,
    fresh: Callable[[int], bool] | None = None,
    first: int = 0,
) -> list[list[Action]]:
    """`check` a run of a schedule over batches of `groups` micro-batches, with as much room for messages as they need.

    **Arguments:** `fresh`, `first`: as in `moments`.

    **Returns:** its streams, one per station.

    >>> from .flushed import OneFOneB
    >>> len(check_schedule(OneFOneB(2), [4, 4]))
    2
    """
    found = streams(schedule, groups, accumulate, fresh=fresh, first=first)
    done = {id(action.entry) for stream in found for action in stream}
    for entry in schedule.entries:
        if entry.when is None and id(entry) not in done:
            raise ScheduleError(f"station {entry.station} never does {entry}, which the schedule lists")
    # A lone layer without an input gradient looks like a stage that forgot it; only what is listed tells them apart.
    backward = {entry.station for entry in schedule.entries if entry.kind in (Kind.B, Kind.I)}
    alone = any(entry.kind is Kind.W and entry.station not in backward for entry in schedule.entries)
    _check(found, None, _is_chain(schedule.entries) and not alone)
    return found


def _is_chain(entries: Iterable[Entry]) -> bool:
    """Whether these are stages that hand states up and gradients down, and nothing else."""
    entries = list(entries)
    stages = 1 + max(entry.station for entry in entries)
    return all(e.kind in _CHAIN and e == chain_entry(e.kind, e.station, stages, e.offset) for e in entries)


def check_order(order: Iterable[Action]) -> None:
    """Raise `ScheduleError` unless one global order is a complete run in which nothing comes before what it needs.

    >>> from .periodic import ticked
    >>> from .runs import unroll
    >>> check_order(unroll(ticked(3), [1, 1]))
    """
    order = list(order)
    stations = 1 + max((action.station for action in order), default=-1)
    found = resolved(place(order, range(stations))) if stations else []
    check(found)
    progress = Progress(found)
    at = [0] * stations
    for position, name in enumerate(order):
        action = found[name.station][at[name.station]]
        at[name.station] += 1
        needed = progress.blocker(action)
        if needed is not None:
            raise ScheduleError(f"{action} comes before {needed}, which it needs:\n{excerpt([order], {0: position})}")
        progress.finish(action)


# ------------------------------------------------------------------------------- any station


def _check_station(station: int, stream: Sequence[Action]) -> None:
    newest: dict[int, int] = {}
    done: set[tuple[Kind, int]] = set()
    forwards: set[int] = set()
    unapplied = -1
    has_updates = any(a.kind.cost == "update" for a in stream)
    has_forwards = any(a.kind.cost == "forward" for a in stream)
    for position, action in enumerate(stream):
        before = newest.get(id(action.entry), -1)
        if action.micro <= before:
            raise ScheduleError(
                f"station {station} does {action} after the same for micro-batch {before}\n"
                + excerpt([stream], {0: position})
            )
        newest[id(action.entry)] = action.micro
        if (action.kind, action.micro) in done:
            raise ScheduleError(
                f"station {station} does {action} a second time: entries of one kind must exclude each other\n"
                + excerpt([stream], {0: position})
            )
        done.add((action.kind, action.micro))
        if action.kind.cost == "forward":
            forwards.add(action.micro)
        elif action.kind.cost in _GRADIENTS:
            unapplied = position
            if has_forwards and action.micro not in forwards:
                raise ScheduleError(
                    f"station {station} does {action} before its forward\n" + excerpt([stream], {0: position})
                )
        elif action.kind.cost == "update":
            unapplied = -1
    if has_updates and unapplied >= 0:
        raise ScheduleError(
            f"station {station} never applies the gradient of {stream[unapplied]}: an update is missing\n"
            + excerpt([stream], {0: unapplied})
        )


# --------------------------------------------------------------------------- stages of a chain


def _check_chain(stages: Streams) -> None:
    count = 1 + max((a.batch for stream in stages for a in stream if a.kind is not Kind.U), default=-1)
    if count == 0:
        raise ScheduleError("the schedule has no forward and no backward at all")
    for stage in range(len(stages)):
        for duty, kinds, default in _DUTIES:
            _check_once_in_order(stages, stage, count, duty, kinds, default)
        _check_backward_after_forward(stages, stage)
    groups = [_updates(stages, stage) for stage in range(len(stages))]
    for stage, updates in enumerate(groups):
        if updates != groups[0]:
            number = next((n for n, (a, b) in enumerate(zip(updates, groups[0], strict=False)) if a != b), len(updates))
            raise ScheduleError(
                f"update {number} does not end with the same micro-batch at stations 0 and {stage}: "
                f"the updates end with {groups[0]} and {updates}"
            )


def _check_once_in_order(
    stages: Streams, stage: int, count: int, duty: str, kinds: tuple[Kind, ...], default: Kind
) -> None:
    ids = [a.batch for a in stages[stage] if a.kind in kinds]
    if ids == list(range(count)):
        return
    times = Counter(ids)
    missing = next((batch for batch in range(count) if batch not in times), None)
    done = [(position, a) for position, a in enumerate(stages[stage]) if a.kind in kinds]
    if missing is not None:
        # Another stage tells whether this schedule splits its backward.
        kind = next((a.kind for stream in stages for a in stream if a.kind in kinds and a.batch == missing), default)
        gap = next((position for position, a in done if a.batch > missing), len(stages[stage]))
        raise ScheduleError(
            f"station {stage} never does the {duty} of micro-batch {missing}: {stage}{kind}{missing} is missing\n"
            + _around(stages, stage, gap, missing)
        )
    expected, (position, action) = next((n, d) for n, d in enumerate(done) if d[1].batch != n)
    fault = "a second time" if times[action.batch] > 1 else f"where micro-batch {expected} should come"
    raise ScheduleError(f"station {stage} does {action} {fault}\n" + _around(stages, stage, position, action.batch))


def _check_backward_after_forward(stages: Streams, stage: int) -> None:
    forwards = inputs = 0
    for position, action in enumerate(stages[stage]):
        kind, _, batch = action
        forwards += kind is Kind.F
        if kind is Kind.W and batch >= inputs:
            needs = Kind.I
        elif kind in (Kind.B, Kind.I) and batch >= forwards:
            needs = Kind.F
        else:
            inputs += kind in (Kind.B, Kind.I)
            continue
        raise ScheduleError(
            f"station {stage} does {action} before {stage}{needs}{batch}\n" + _around(stages, stage, position, batch)
        )


def _updates(stages: Streams, stage: int) -> list[int]:
    """Give the last micro-batch of each update, having checked that all gradients reach one."""
    ends: list[int] = []
    newest = -1
    for position, action in enumerate(stages[stage]):
        if action.kind in (Kind.B, Kind.W):
            newest = action.batch
        elif action.kind is Kind.U:
            if action.batch != len(ends):
                raise ScheduleError(
                    f"station {stage} does {action}, but {stage}{Kind.U}{len(ends)} is the update that is due\n"
                    + _around(stages, stage, position, newest)
                )
            if newest == (ends[-1] if ends else -1):
                raise ScheduleError(
                    f"station {stage} does {action} without a new gradient\n" + _around(stages, stage, position, newest)
                )
            ends.append(newest)
    if not ends or ends[-1] != newest:
        raise ScheduleError(
            f"station {stage} never applies the gradient of micro-batch {newest}: "
            f"update {stage}{Kind.U}{len(ends)} is missing\n" + _around(stages, stage, len(stages[stage]), newest)
        )
    return ends


def _around(stages: Streams, stage: int, position: int, batch: int) -> str:
    """Show the place in its stage, and the same micro-batch at the neighbours."""
    marks = {stage: position}
    for other in (stage - 1, stage + 1):
        if 0 <= other < len(stages):
            marks[other] = _first(stages[other], batch)
    return excerpt(stages, marks, name="station")


def _first(stream: Sequence[Action], batch: int) -> int:
    return next((at for at, a in enumerate(stream) if a.batch == batch and a.kind is not Kind.U), len(stream))
