"""The vocabulary of schedules: entries, the messages between them, and what a run does with them.

A schedule is data. It lists *entries*: what a station does with a micro-batch, which messages that takes and which it
gives. What happens when micro-batches enter (`feed`) and when no more will come (`drain`) is one global order of
entries; the stream of one station is that order filtered by station. Every executor follows it literally, so results do
not depend on timing.

A station is one run of layers at one place. Those of a chain count from 0 (nearest the data) upwards. Micro-batches
count from 0 since the pipeline was last empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from ..errors import ScheduleError

__all__ = ["OUTSIDE", "Action", "Cost", "Entry", "Kind", "Moment", "Port", "Route", "Schedule", "chain_entry"]

#: What class of cost an entry belongs to.
Cost = Literal["forward", "backward", "input gradient", "weight gradient", "update", "auxiliary", "none"]

#: The station that data come from: nobody has to send them.
OUTSIDE = -1


class Kind(str):
    """A name for timetables and a class of cost; nothing else.

    There is one object per name, so kinds can be compared with `is`.

    >>> Kind("F") is Kind.F, Kind.F.cost
    (True, 'forward')
    """

    cost: Cost
    _known: ClassVar[dict[str, Kind]] = {}
    F: ClassVar[Kind]
    B: ClassVar[Kind]
    I: ClassVar[Kind]  # noqa: E741 - the field's own letter for the input-gradient half
    W: ClassVar[Kind]
    U: ClassVar[Kind]

    def __new__(cls, name: str, cost: Cost = "none") -> Kind:
        known = cls._known.get(name)
        if known is None:
            known = cls._known[name] = super().__new__(cls, name)
            known.cost = cost
        elif cost not in ("none", known.cost):
            raise ScheduleError(f"kind {name} costs as {known.cost}, not as {cost}: choose another name")
        return known

    @classmethod
    def known(cls, name: str) -> Kind | None:
        """The kind of this name, if a method or this module has made one.

        >>> Kind.known("F") is Kind.F, Kind.known("no such kind")
        (True, None)
        """
        return cls._known.get(name)

    def __reduce__(self) -> Any:
        return Kind, (str(self), self.cost)


Kind.F = Kind("F", "forward")
Kind.B = Kind("B", "backward")
Kind.I = Kind("I", "input gradient")
Kind.W = Kind("W", "weight gradient")
Kind.U = Kind("U", "update")


class Port(NamedTuple):
    """A message that an entry takes from another station, or gives to it."""

    name: str
    station: int


#: Name, sender and receiver of a message: those of one route arrive in the order in which they were sent.
Route = tuple[str, int, int]


class Moment(Protocol):
    """What an entry may depend on: facts about a micro-batch that are known as soon as it enters."""

    @property
    def batch(self) -> int:
        """The batch it was cut from, counted over the whole run."""

    @property
    def update(self) -> int:
        """The update it contributes to."""

    @property
    def ends(self) -> bool:
        """Whether that update follows it."""

    @property
    def fresh(self) -> bool:
        """Whether it holds samples that were not met before, where the method asks."""


@dataclass(frozen=True)
class Entry:
    """One thing that one station does, again and again.

    **Arguments:**

    - `offset`: micro-batch `s - offset` is due in slot `s`.
    - `takes`, `gives`: messages; operations see them in this order.
    - `when`: only for micro-batches for which this holds. Two entries of one kind and station must exclude each other.
    - `per`: for every micro-batch, or only for those that end an update.

    >>> print(Entry(Kind.F, 1, takes=(Port("state", 0),)))
    1F
    """

    kind: Kind
    station: int
    offset: int = 0
    takes: tuple[Port, ...] = ()
    gives: tuple[Port, ...] = ()
    when: Callable[[Moment], bool] | None = None
    per: Literal["micro", "update"] = "micro"

    def __str__(self) -> str:
        return f"{self.station}{self.kind}"

    @cached_property
    def incoming(self) -> tuple[Route, ...]:
        """Routes of what it takes from other stations."""
        return tuple((name, sender, self.station) for name, sender in self.takes if sender != OUTSIDE)

    @cached_property
    def outgoing(self) -> tuple[Route, ...]:
        """Routes of what it gives."""
        return tuple((name, self.station, receiver) for name, receiver in self.gives)

    def due(self, moment: Moment) -> bool:
        """Whether it is done for this micro-batch."""
        return (self.per == "micro" or moment.ends) and (self.when is None or self.when(moment))


class _Name(NamedTuple):
    kind: Kind
    station: int
    batch: int


class Action(_Name):
    """An entry at work: `batch` is a micro-batch, or the update's number for what is done once per update.

    Actions are equal if they have the same name; the entry and the micro-batch come along where they are known.

    >>> str(Action(Kind.F, 2, 0))
    '2F0'
    """

    entry: Entry | None = None
    micro: int = -1

    def __str__(self) -> str:
        return f"{self.station}{self.kind}{self.batch}"

    @classmethod
    def of(cls, entry: Entry, micro: int, number: int) -> Action:
        """The action of an entry for a micro-batch, called by `number`."""
        found = cls(entry.kind, entry.station, number)
        found.entry, found.micro = entry, micro
        return found


class Schedule(ABC):
    """In which order stations treat the micro-batches that are fed to them."""

    #: How many stages of the network the schedule is for.
    stages: int
    #: All entries; `feed` and `drain` name them by their number.
    entries: tuple[Entry, ...]
    #: Whether the pipeline is empty after every `feed` (synchronous schedules).
    flushes: ClassVar[bool] = False

    @property
    @abstractmethod
    def depth(self) -> int:
        """Micro-batches that enter before one is through everywhere."""

    @abstractmethod
    def feed(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        """Yield, in one global order, what the entry of micro-batches `first .. first+count-1` sets off.

        **Returns:** pairs of the number of an entry and a micro-batch. Whether the entry is due for that micro-batch
        (`Entry.due`) is for the reader to ask.
        """

    @abstractmethod
    def drain(self, fed: int) -> Iterator[tuple[int, int]]:
        """Yield what remains to be done once `fed` micro-batches have entered and no more will."""

    @abstractmethod
    def delay(self, stage: int) -> int:
        """Rounds between the forward of a micro-batch and its last gradient at `stage`, in steady state."""

    @abstractmethod
    def finished(self, stage: int, micro: int) -> int:
        """Count the gradients that `stage` has added up when it begins the forward of `micro`."""

    def lateness(self, stage: int) -> int:
        """Micro-batches between the weights that a forward sees and those its gradient is applied to."""
        return 0 if self.flushes else self.delay(stage) - self.finished(stage, self.delay(stage))

    @property
    def stations(self) -> int:
        """How many there are."""
        return 1 + max(entry.station for entry in self.entries)

    @property
    def splits_backward(self) -> bool:
        """Whether the backward is done in two halves, `I` and `W`."""
        return any(entry.kind is Kind.I for entry in self.entries)


def chain_entry(kind: Kind, station: int, stages: int, offset: int = 0) -> Entry:
    """An entry of a chain: states go up from forward to forward, gradients down from backward to backward.

    >>> chain_entry(Kind.F, 1, 3).takes, chain_entry(Kind.B, 1, 3).takes
    ((Port(name='forward', station=0),), (Port(name='backward', station=2),))
    """
    below, above, last = station - 1, station + 1, station == stages - 1
    if kind is Kind.F:
        takes = Port("forward", below) if station else Port("data", OUTSIDE)
        return Entry(kind, station, offset, (takes,), () if last else (Port("forward", above),))
    if kind is Kind.B or kind is Kind.I:
        gives = (Port("backward", below),) if station else ()
        return Entry(kind, station, offset, () if last else (Port("backward", above),), gives)
    return Entry(kind, station, offset, per="update" if kind is Kind.U else "micro")
