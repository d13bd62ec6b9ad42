"""A schedule for several replicas of a network, each trained on its share of the rows of every micro-batch.

Every replica, a *column*, does what the schedule lists. Columns meet at three points only, which are entries like any
others, so that checks, room for messages, simulation and timetables know of them:

    D+   rows of a whole batch are shared out, before anything else    gives rows to the first stations of all columns
    F>   the loss of a column's rows, from its last stage              gives loss to all columns
    F<   the loss of the whole micro-batch, before the backward        takes loss of all columns
    U>   gradients that are complete, before they are applied          gives gradients to all other columns
    U<   their sum, in the order of the columns                        takes gradients of all other columns

From three columns on, each one adds up a share of the elements for all of them, so that twice the gradients leave it in
place of one time for every other column. The order of additions stays that of the columns:

    U>   gradients that are complete, before they are applied          gives each other column its share of them
    U=   the sum of a share, in the order of the columns               takes these shares, gives the sum to all others
    U<   all sums                                                      takes the sums of all other columns

Gradients travel in parts, each of which is a port of `U>`. All but the last may leave before it is the turn of `U>`, in
the backward that completes them (`Replicated.completes`). Nobody can tell but for the time: a station takes nothing
between the two, so it knows no more of others at the second, and messages pile up no higher. So room, checks and
simulation are those of the entries that are listed.

An entry of the schedule becomes one of every column, with all columns at the same point before any of them goes on: an
order in which one process can do everything, and which keeps the order of each column. So what columns wait for is
never behind themselves. Rows come first because a process learns from them that there is a batch: one that had to wait
for the gradients of others before it shares rows out would wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..errors import ScheduleError
from .entries import OUTSIDE, Entry, Kind, Port, Route, Schedule
from .whole_norm import ADD_SQUARES
from .workload import Workload

__all__ = ["SHARE_ROWS", "Replicated", "adding", "giving", "parts_of", "taking"]

SHARE_ROWS = Kind("D+")
_ROWS = "rows"
#: Parts that gradients travel in, the bytes below which a part is not worth a message, and those that it has at most.
_PARTS, _LEAST, _MOST = 8, 2**19, 25 * 2**20


def parts_of(nbytes: float) -> int:
    """In how many parts gradients of so many bytes travel.

    >>> [parts_of(nbytes) for nbytes in (1e4, 1.1e6, 1e8, 1e9)]
    [1, 2, 8, 39]
    """
    return max(1, min(_PARTS, int(nbytes // _LEAST)), math.ceil(nbytes / _MOST))


def giving(kind: Kind) -> Kind:
    """The kind of the entry by which columns tell each other something about an entry of `kind`."""
    return Kind(f"{kind}>")


def taking(kind: Kind) -> Kind:
    """The kind of the entry by which they hear of it."""
    return Kind(f"{kind}<")


def adding(kind: Kind) -> Kind:
    """The kind of the entry by which each of three or more columns adds up its share of what all of them give."""
    return Kind(f"{kind}=")


@dataclass(frozen=True)
class Replicated(Schedule):
    """A schedule done by `replicas` columns at once.

    Station `s` of column `c` is station `c * base.stations + s`.

    **Arguments:**

    - `base`: what each column does.
    - `also`: kinds of entries, beside updates, that apply gradients: of networks that are trained beside the stages.
    - `parts`: for each station of `base`, how many its gradients travel in; one by default.

    >>> from .flushed import Sequential
    >>> from .runs import unroll
    >>> " ".join(map(str, unroll(Replicated(Sequential(1), 2), [1])))
    '0D+0 0F0 1F0 0F>0 1F>0 0F<0 1F<0 0B0 1B0 0U>0 1U>0 0U<0 1U<0 0U0 1U0'
    """

    base: Schedule
    replicas: int
    also: frozenset[Kind] = field(default_factory=frozenset)
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        inlets = [entry for entry in self.base.entries if _enters(entry)]
        if len(inlets) != 1 or inlets[0].offset:
            found = ", ".join(f"{entry} at offset {entry.offset}" for entry in inlets) or "no entry"
            raise ScheduleError(
                f"rows of a batch are shared out where it enters, but {found} of the schedule takes data: expected one "
                "at offset 0"
            )

    @property
    def stages(self) -> int:  # type: ignore[override]
        """How many stages of the network it is for."""
        return self.base.stages

    @property
    def flushes(self) -> bool:  # type: ignore[override]
        """Whether the pipeline is empty after every `feed`."""
        return self.base.flushes

    @property
    def depth(self) -> int:
        return self.base.depth

    @cached_property
    def entries(self) -> tuple[Entry, ...]:  # type: ignore[override]
        """Those of all columns, entry by entry."""
        return (self._share_out(), *(entry for group in self._groups for entry in group))

    @cached_property
    def _numbers(self) -> list[range]:
        """For each entry of the schedule the numbers of those that stand for it."""
        found, first = [], 1
        for group in self._groups:
            found.append(range(first, first + len(group)))
            first += len(group)
        return found

    @cached_property
    def _groups(self) -> list[list[Entry]]:
        groups = []
        for number, entry in enumerate(self.base.entries):
            group = [heard for forward in self._awaited.get(number, ()) for heard in self._hear(forward, entry.offset)]
            if self._applies(entry):
                group += [*self._give(entry), *self._sum(entry)]
            group += [self._of_column(entry, column) for column in self._columns]
            if self._makes_loss(entry):
                group += self._tell(entry)
            groups.append(group)
        return groups

    @cached_property
    def _awaited(self) -> dict[int, list[Entry]]:
        """Forwards whose loss is heard of before an entry, by the number of that entry.

        It is the first thing that the last stage does with a micro-batch after its forward: until then nobody waits.
        """
        found: dict[int, list[Entry]] = {}
        own = [(e.offset, n, e) for n, e in enumerate(self.base.entries) if e.station == self.stages - 1]
        for offset, number, forward in own:
            if not self._makes_loss(forward):
                continue
            follows = [
                (later, n)
                for later, n, entry in own
                if (later, n) > (offset, number) and entry.per == "micro" and entry.kind.cost != "forward"
            ]
            if not follows:
                raise ScheduleError(
                    f"station {forward.station} does nothing for every micro-batch after {forward}: expected its "
                    "backward, before which the columns tell each other their losses"
                )
            found.setdefault(min(follows)[1], []).append(forward)
        return found

    def _makes_loss(self, entry: Entry) -> bool:
        return entry.station == self.stages - 1 and entry.kind.cost == "forward"

    def _applies(self, entry: Entry) -> bool:
        """Whether an entry needs the sum of gradients: where the norm of the whole is asked for, that comes first."""
        if self._asks_for_norm:
            return entry.kind is ADD_SQUARES
        return entry.kind.cost == "update" or entry.kind in self.also

    @cached_property
    def _asks_for_norm(self) -> bool:
        return any(entry.kind is ADD_SQUARES for entry in self.base.entries)

    def completes(self, update: Kind, station: int) -> Kind | None:
        """The kind of entry that adds the last of the gradients that an `update` of a station of `base` applies.

        It does so for the micro-batch that ends the update, and the station takes nothing between the two. `None` where
        the schedule does not tell; an incomplete accumulation, applied at the end of a run, has no such micro-batch.

        >>> from .flushed import ZBH1
        >>> Replicated(ZBH1(2), 2).completes(Kind.U, 0)
        'W'
        """
        own = [entry for entry in self.base.entries if entry.station == station]
        at = next(n for n, entry in enumerate(own) if entry.kind is update)
        for entry in reversed(own[:at]):
            if entry.kind.cost in ("backward", "weight gradient"):
                known = entry.when is None and entry.per == "micro" and entry.offset == own[at].offset
                return entry.kind if known and own[at].when is None else None
            if entry.takes:
                return None
        return None

    # ------------------------------------------------------------------- entries of columns

    @property
    def _columns(self) -> range:
        return range(self.replicas)

    def _at(self, station: int, column: int) -> int:
        return station + column * self.base.stations if station != OUTSIDE else OUTSIDE

    def _of_column(self, entry: Entry, column: int) -> Entry:
        """The same for one column; its rows come from the first station of all."""
        takes = tuple(
            Port(_ROWS, 0) if port.station == OUTSIDE else Port(port.name, self._at(port.station, column))
            for port in entry.takes
        )
        gives = tuple(Port(port.name, self._at(port.station, column)) for port in entry.gives)
        return replace(entry, station=self._at(entry.station, column), takes=takes, gives=gives)

    def _share_out(self) -> Entry:
        entry = next(filter(_enters, self.base.entries))
        takes = tuple(port for port in entry.takes if port.station == OUTSIDE)
        gives = tuple(Port(_ROWS, self._at(entry.station, column)) for column in self._columns)
        return Entry(SHARE_ROWS, 0, 0, takes, gives, entry.when)

    def _tell(self, forward: Entry) -> Iterator[Entry]:
        for own in self._columns:
            gives = tuple(Port(_from(forward, own), self._at(forward.station, column)) for column in self._columns)
            station = self._at(forward.station, own)
            yield replace(forward, kind=giving(forward.kind), station=station, takes=(), gives=gives)

    def _hear(self, forward: Entry, offset: int) -> Iterator[Entry]:
        senders = [(column, self._at(forward.station, column)) for column in self._columns]
        takes = tuple(Port(_from(forward, column), station) for column, station in senders)
        for _, station in senders:
            yield Entry(taking(forward.kind), station, offset, takes, when=forward.when)

    def _give(self, update: Entry) -> Iterator[Entry]:
        for own in self._columns:
            station, others = self._at(update.station, own), self._others(update, own)
            gives = tuple(Port(name, other) for _, other in others for name in self._names(update, own))
            yield replace(update, kind=giving(update.kind), station=station, takes=(), gives=gives)

    def _sum(self, update: Entry) -> Iterator[Entry]:
        kind, ways = taking(update.kind), [(own, self._others(update, own)) for own in self._columns]
        if self._shares:
            kind = adding(update.kind)
        for own, others in ways:
            takes = tuple(Port(name, other) for column, other in others for name in self._names(update, column))
            gives = tuple(Port(f"{kind}/{own}", other) for _, other in others) if self._shares else ()
            yield replace(update, kind=kind, station=self._at(update.station, own), takes=takes, gives=gives)
        for own, others in ways if self._shares else ():
            takes = tuple(Port(f"{kind}/{column}", other) for column, other in others)
            station = self._at(update.station, own)
            yield replace(update, kind=taking(update.kind), station=station, takes=takes, gives=())

    @property
    def _shares(self) -> bool:
        """Whether each column adds up a share for all. Two would send as much, and wait twice."""
        return self.replicas > 2

    def _names(self, update: Entry, column: int) -> list[str]:
        """What the parts of the gradients of a column are called."""
        beside = not self.parts or update.kind in self.also
        return [f"{_from(update, column)}.{n}" for n in range(1 if beside else self.parts[update.station])]

    def _others(self, entry: Entry, own: int) -> list[tuple[int, int]]:
        return [(column, self._at(entry.station, column)) for column in self._columns if column != own]

    # ------------------------------------------------------------------------------- costs

    def workload(self, one: Workload, gradients: Sequence[float] = ()) -> Workload:
        """What the columns cost, given what one network costs for whole micro-batches.

        Each has its share of the rows, and of the time and bytes that go with them; its updates are as long as ever.

        **Arguments:** `gradients`: bytes that each station sums before its update; none by default. They leave when the
        backward has ended, so times are an upper bound where parts of them leave before.

        >>> from .channel import Channel
        >>> from .flushed import Sequential
        >>> from .machine import Machine
        >>> from .runs import streams
        >>> from .simulator import simulate
        >>> two = Replicated(Sequential(1), 2)
        >>> work = two.workload(Workload({Kind.F: 4, Kind.B: 8, Kind.U: 1}), [30])
        >>> simulate(streams(two, [1]), work, Machine(Channel(bandwidth=10))).makespan
        10.0
        """
        times: list[dict[Kind, float]] = [{} for _ in range(self.base.stations)]
        sizes: dict[Route | str, float] = {}
        for entry in self.base.entries:
            time = one.time(entry)
            times[entry.station][entry.kind] = time if entry.kind.cost == "update" else time / self.replicas
            sizes |= {route: one.bytes(route) / self.replicas for route in entry.outgoing}
        kept = [size / self.replicas for size in one.kept_bytes(self.stages)]
        return self.together(Workload(times, sizes, kept), gradients)

    def together(self, column: Workload, gradients: Sequence[float] = ()) -> Workload:
        """What the columns cost, given what each of them costs for its share of micro-batches.

        **Arguments:** `gradients`: as for `workload`. What networks beside the stages sum has no known size.
        """
        kinds = {entry.kind for entry in self.base.entries}
        times = [{kind: column.time(Entry(kind, station)) for kind in kinds} for station in range(self.base.stations)]
        sizes: dict[Route | str, float] = {}
        for entry in self.base.entries:
            for name, sender, receiver in entry.outgoing:
                for own in self._columns:
                    sizes[name, self._at(sender, own), self._at(receiver, own)] = column.bytes((name, sender, receiver))
        unknown = {kind for also in self.also for kind in (giving(also), adding(also))}
        for entry in self.entries:
            if gradients and entry.gives and entry.per == "update" and entry.kind not in kinds | unknown:
                whole = gradients[entry.station % self.base.stations]
                each = whole / self.replicas if self._shares else whole
                parts = len(entry.gives) // (self.replicas - 1)
                sizes |= dict.fromkeys(entry.outgoing, each / parts)
        return Workload(times * self.replicas, sizes, column.kept_bytes(self.stages))

    # ------------------------------------------------------------------------------- order

    def feed(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        for micro in range(first, first + count):
            yield 0, micro
        yield from self._expanded(self.base.feed(first, count))

    def drain(self, fed: int) -> Iterator[tuple[int, int]]:
        return self._expanded(self.base.drain(fed))

    def _expanded(self, turns: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for number, micro in turns:
            for own in self._numbers[number]:
                yield own, micro

    def delay(self, stage: int) -> int:
        return self.base.delay(stage)

    def finished(self, stage: int, micro: int) -> int:
        return self.base.finished(stage, micro)


def _enters(entry: Entry) -> bool:
    return any(port.station == OUTSIDE for port in entry.takes)


def _from(entry: Entry, column: int) -> str:
    """What a column's message about an entry is called."""
    return f"{entry.kind}/{column}"
