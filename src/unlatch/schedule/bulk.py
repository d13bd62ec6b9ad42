"""Figures of large runs without a list of their actions: all devices advance at once, and what repeats is skipped.

1. *Levels.* An entry does micro-batch `m` at level `P (m + offset) + level`, with levels chosen so that whatever an
   action waits for (the action before it on its device, the messages it takes) lies at lower ones. Then all actions of
   one level are independent and are one operation on arrays. `P` levels make a round, in which every entry acts once.
2. *Whole numbers.* Times become multiples of a quantum: exactly, where they are integers or fractions; floats are
   rounded to some 60 bits. So sums are exact, and two states are equal or they are not.
3. *Repetition.* A pipeline with constant costs falls into a pattern. When the times of all devices, wires and messages
   are those of an earlier round plus a constant, so are all later ones, as long as every entry is at work: the rounds
   up to the end are skipped in one step. Synchronous schedules repeat from batch to batch as well.

The result is that of `simulate`, number by number (`tests/schedule/test_bulk.py`). Where it does not apply (jitter,
entries that depend on the batch, an order that has no levels), `bulk` returns `None` and the caller simulates.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .entries import Entry, Kind, Route, Schedule
from .flushed import Flushed
from .machine import Machine
from .periodic import Periodic
from .simulator import Sent
from .workload import Workload

__all__ = ["Figures", "bulk", "suits"]

_Ints = NDArray[np.int64]
#: A time at which nothing happens.
_NEVER = -(2**62)
#: Levels in a round are tried up to so many times the entries of a device.
_SPARSE = 4
#: Sweeps over all waits after which levels are given up.
_SWEEPS = 48
#: Bits of the longest time, and of the shortest where it is rounded.
_BITS, _FINE = 61, 28


@dataclass(frozen=True)
class Figures:
    """What a simulation is asked for; see `Simulation`."""

    makespan: float
    busy: list[float]
    interval: float
    in_flight: tuple[int, ...]
    staleness: tuple[float, ...]
    sent: dict[Route, Sent]


@dataclass(frozen=True)
class _Job:
    """A run: so many segments, each of which fills and empties the pipeline."""

    entries: tuple[Entry, ...]
    devices: Sequence[int]
    stages: int
    segments: int
    length: int
    #: Micro-batches per update; whole segments where these are shorter.
    group: int

    @property
    def micros(self) -> int:
        return self.segments * self.length


class _Passes(NamedTuple):
    """Numbers of the entries of a stage that are its forward, its gradient and its update."""

    forward: int
    gradient: int
    update: int | None


def suits(schedule: Schedule, devices: Sequence[int], batches: int, per_update: int, machine: Machine) -> bool:
    """Whether figures can be had in bulk, as far as that can be told at once."""
    if machine.jitter or batches % per_update or any(entry.when is not None for entry in schedule.entries):
        return False
    # A schedule with an order of its own is followed, not guessed.
    kind: Any = type(schedule)
    if isinstance(schedule, Flushed):
        usual = (kind.feed, kind.stream) == (Flushed.feed, Flushed.stream)
        return usual and list(devices) == list(range(schedule.stages))
    return isinstance(schedule, Periodic) and (kind.feed, kind.drain) == (Periodic.feed, Periodic.drain)


def bulk(
    schedule: Schedule,
    workload: Workload,
    devices: Sequence[int],
    *,
    batches: int,
    microbatches: int,
    per_update: int,
    machine: Machine,
    device_count: int,
) -> Figures | None:
    """Figures of a run; arguments as in `simulate_schedule`. `None` where it cannot be done in bulk."""
    if not suits(schedule, devices, batches, per_update, machine):
        return None
    job = _job(schedule, devices, batches, microbatches, per_update)
    passes = [_passes_of(job.entries, stage) for stage in range(schedule.stages)]
    waits = _Waits.of(job)
    if waits is None or any(found is None or not _takes_time(job, found, workload) for found in passes):
        return None
    levels = waits.levels()
    costs = _Costs.of(job, workload, machine, levels) if levels is not None else None
    if costs is None or levels is None:
        return None
    marks = _marks(job)
    run = _Run(job, waits, costs, levels, [found.gradient for found in passes if found is not None])
    ends = run.execute(marks)
    done = [job.micros // (job.group if entry.per == "update" else 1) for entry in job.entries]
    work = [0] * device_count
    for entry, time, count in zip(job.entries, costs.times, done, strict=True):
        work[job.devices[entry.station]] += time * count
    return Figures(
        makespan=costs.value(run.makespan),
        busy=[costs.value(time) for time in work],
        interval=_interval(job, marks, ends, run.makespan, costs),
        in_flight=tuple(_in_flight(job, found) for found in passes if found is not None),
        staleness=tuple(_staleness(job, found) for found in passes if found is not None),
        sent={
            route: Sent(count, count * workload.bytes(route))
            for entry, count in zip(job.entries, done, strict=True)
            for route in entry.outgoing
            if job.devices[route[1]] != job.devices[route[2]]
        },
    )


def _job(schedule: Schedule, devices: Sequence[int], batches: int, parts: int, per_update: int) -> _Job:
    group = parts * per_update
    if not isinstance(schedule, Flushed):
        return _Job(schedule.entries, devices, schedule.stages, 1, batches * parts, group)
    # A synchronous schedule is a periodic one that fills and empties with every batch; its lags are the offsets.
    split = len(schedule.kinds) > 2
    entries = []
    for entry in schedule.entries:
        lag = schedule.lag(entry.station, parts)
        last = schedule.weight_lag(parts) if split else lag
        offset = {Kind.F: 0, Kind.W: last, Kind.U: last}.get(entry.kind, lag)
        entries.append(replace(entry, offset=offset))
    return _Job(tuple(entries), devices, schedule.stages, batches, parts, group)


def _passes_of(entries: Sequence[Entry], stage: int) -> _Passes | None:
    """`None` unless the stage does each of them once in a round."""
    mine = [(number, entry) for number, entry in enumerate(entries) if entry.station == stage]
    forward = [n for n, entry in mine if entry.kind.cost == "forward"]
    gradient = [n for n, entry in mine if entry.kind.cost in ("backward", "weight gradient")]
    update = [n for n, entry in mine if entry.kind.cost == "update"]
    regular = all((entry.per == "update") == (n in update) for n, entry in mine if n in {*forward, *gradient, *update})
    if not regular or len(forward) != 1 or len(gradient) != 1 or len(update) > 1:
        return None
    return _Passes(forward[0], gradient[0], update[0] if update else None)


def _takes_time(job: _Job, found: _Passes, workload: Workload) -> bool:
    """Whether the gradient of a micro-batch cannot end in the moment in which its forward begins."""
    return workload.time(job.entries[found.forward]) > 0


class _Wait(NamedTuple):
    """The action of `later` in slot `s` waits for that of `earlier` in slot `s - gap`."""

    earlier: int
    later: int
    gap: int


@dataclass(frozen=True)
class _Waits:
    """Who waits for whom, and which queue a message goes through."""

    job: _Job
    orders: list[_Wait]
    messages: dict[Route, _Wait]

    @classmethod
    def of(cls, job: _Job) -> _Waits | None:
        """`None` where messages of a route are not given by one entry and taken by one other, of the same rate."""
        on_device: dict[int, list[int]] = defaultdict(list)
        givers: dict[Route, list[int]] = defaultdict(list)
        takers: dict[Route, list[int]] = defaultdict(list)
        for number, entry in enumerate(job.entries):
            on_device[job.devices[entry.station]].append(number)
            for route in entry.outgoing:
                givers[route].append(number)
            for route in entry.incoming:
                takers[route].append(number)
        orders = []
        for numbers in on_device.values():
            orders += [_Wait(a, b, 0) for a, b in pairwise(numbers)]
            orders.append(_Wait(numbers[-1], numbers[0], 1))
        messages = {}
        for route, taking in takers.items():
            giving = givers.get(route, [])
            if len(giving) != 1 or len(taking) != 1:
                return None
            first, then = job.entries[giving[0]], job.entries[taking[0]]
            if first.per != then.per or then.offset < first.offset:
                return None
            messages[route] = _Wait(giving[0], taking[0], then.offset - first.offset)
        # What nobody takes is of no consequence but for its wire.
        for route, giving in givers.items():
            if len(giving) != 1:
                return None
            messages.setdefault(route, _Wait(giving[0], giving[0], 1))
        return cls(job, orders, messages)

    def levels(self) -> tuple[int, list[int]] | None:
        """Levels per round and the level of each entry; `None` if few enough do not suffice."""
        everything = [*self.orders, *self.messages.values()]
        # Up and down the chain in turns: a wait along it is settled in one sweep.
        upwards = sorted(everything, key=lambda wait: wait.earlier)
        downwards = upwards[::-1]
        most = max(sum(wait.gap == 0 for wait in group) + 1 for group in self._by_device().values())
        for width in range(most, _SPARSE * most + 1):
            found = [0] * len(self.job.entries)
            for sweep in range(_SWEEPS):
                changed = False
                for earlier, later, gap in downwards if sweep % 2 else upwards:
                    least = found[earlier] + 1 - width * gap
                    if found[later] < least:
                        found[later], changed = least, True
                if not changed:
                    return width, found
        return None

    def _by_device(self) -> dict[int, list[_Wait]]:
        found: dict[int, list[_Wait]] = defaultdict(list)
        for wait in self.orders:
            found[self.job.devices[self.job.entries[wait.earlier].station]].append(wait)
        return found


class _Way(NamedTuple):
    """What a message costs, in quanta; `wire` is -1 within a device."""

    wire: int
    sending: int
    latency: int
    blocking: bool


@dataclass(frozen=True)
class _Costs:
    """All times in quanta."""

    times: list[int]
    ways: dict[Route, _Way]
    wires: int
    quantum: Fraction | float

    @classmethod
    def of(cls, job: _Job, workload: Workload, machine: Machine, levels: tuple[int, list[int]]) -> _Costs | None:
        """`None` where whole numbers of 64 bits do not hold the times finely enough."""
        times = [
            machine.time(workload.time(entry), job.devices[entry.station], entry.kind.cost) for entry in job.entries
        ]
        wires: dict[tuple[int, int], int] = {}
        links: dict[Route, tuple[int, float, float, bool]] = {}
        for entry in job.entries:
            for route in entry.outgoing:
                ends = job.devices[route[1]], job.devices[route[2]]
                if ends[0] == ends[1]:
                    links[route] = (-1, 0, 0, False)
                    continue
                link = machine.link(route)
                wire = wires.setdefault(ends, len(wires))
                links[route] = (wire, link.sending(workload.bytes(route)), link.latency, not link.overlapped)
        costs = [*times, *(cost for _, sending, latency, _ in links.values() for cost in (sending, latency))]
        # No level begins later than the one before plus the longest action with all its messages.
        slowest = max(
            time + sum(links[route][1] + links[route][2] for route in (*entry.outgoing, *entry.incoming))
            for entry, time in zip(job.entries, times, strict=True)
        )
        width, found = levels
        depth = max(found) + width * (1 + job.length + max(entry.offset for entry in job.entries))
        quanta = _quanta(costs, depth * job.segments * (slowest or 1))
        if quanta is None:
            return None
        whole, quantum = quanta
        ways = {
            route: _Way(wire, whole(sending), whole(latency), blocking)
            for route, (wire, sending, latency, blocking) in links.items()
        }
        return cls([whole(time) for time in times], ways, len(wires), quantum)

    def value(self, quanta: int) -> Any:
        """A time in the caller's units; whole numbers and fractions stay exact."""
        return quanta if self.quantum == 1 else quanta * self.quantum


def _quanta(costs: Sequence[float], longest: float) -> tuple[Any, Fraction | float] | None:
    """A function from times to whole numbers of quanta, and the quantum. **Arguments:** `longest`: a time, at least."""
    if not all(math.isfinite(cost) for cost in costs):
        return None
    if all(isinstance(cost, int | Fraction) for cost in costs):
        parts = math.lcm(*(Fraction(cost).denominator for cost in costs))
        return (lambda cost: int(cost * parts), Fraction(1, parts)) if longest * parts < 2**_BITS else None
    scale = 2.0 ** (_BITS - math.frexp(float(longest))[1])
    if not 2.0**-1000 < scale < 2.0**1000 or any(0 < cost * scale < 2**_FINE for cost in costs):
        return None
    return lambda cost: round(cost * scale), 1 / scale


class _Group(NamedTuple):
    """Entries that act at the same levels, in the order of their shifts: in round `t` for micro-batch `t - shift`."""

    numbers: _Ints
    shift: _Ints
    device: _Ints
    time: _Ints
    receiving: _Ints | None
    takes: list[_Ints]
    gives: list[_Given]
    updates: bool

    def at_work(self, turn: int, length: int, ends: int) -> slice | _Ints | None:
        """Which of them have something to do; `ends`: micro-batches per update, 0 if the segment ends none."""
        low = int(np.searchsorted(self.shift, turn - length, "right"))
        high = int(np.searchsorted(self.shift, turn, "right"))
        if low >= high:
            return None
        if not self.updates or ends == 1:
            return slice(low, high)
        due = (turn - self.shift[low:high] + 1) % ends == 0 if ends else np.zeros(0, bool)
        chosen = low + np.flatnonzero(due)
        return chosen if len(chosen) else None


class _Given(NamedTuple):
    """One message of each entry of a group."""

    queue: _Ints
    wire: _Ints
    sending: _Ints
    latency: _Ints
    blocking: NDArray[np.bool_] | None


class _Run:
    """The state of all devices, wires and queues."""

    def __init__(
        self, job: _Job, waits: _Waits, costs: _Costs, levels: tuple[int, list[int]], gradients: Sequence[int]
    ) -> None:
        self.job = job
        width, found = levels
        self.shifts = [level // width + entry.offset for level, entry in zip(found, job.entries, strict=True)]
        reach = max((self.shifts[w.later] - self.shifts[w.earlier] for w in waits.messages.values()), default=0)
        #: Messages of a route that are remembered; a power of two, so that a mask finds the place of a micro-batch.
        self.ring = 2 ** (reach + 1).bit_length()
        queues = {route: number for number, route in enumerate(waits.messages)}
        # Two rows more: nothing ever comes out of one, and nobody looks into the other.
        self.tokens = np.full((len(queues) + 2) * self.ring, _NEVER, np.int64)
        self.nothing, self.nowhere = len(queues) * self.ring, (len(queues) + 1) * self.ring
        self.wires = np.full(costs.wires + 1, _NEVER, np.int64)
        self.free = np.zeros(1 + max(job.devices), np.int64)
        self.last = np.zeros_like(self.free)
        #: For each entry, the place of its stage among the gradients; -1 if it is none.
        self.place = np.full(len(job.entries), -1)
        self.place[list(gradients)] = range(len(gradients))
        self.stages = len(gradients)
        self.groups = self._grouped(found, width, queues, costs)

    def _grouped(self, levels: Sequence[int], width: int, queues: dict[Route, int], costs: _Costs) -> list[_Group]:
        members: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for number, entry in enumerate(self.job.entries):
            members[levels[number] % width, entry.per == "update"].append(number)
        return [
            self._group(sorted(numbers, key=lambda n: self.shifts[n]), updates, queues, costs)
            for (_, updates), numbers in sorted(members.items())
        ]

    def _group(self, numbers: list[int], updates: bool, queues: dict[Route, int], costs: _Costs) -> _Group:
        entries = [self.job.entries[number] for number in numbers]

        def ints(values: Iterable[int]) -> _Ints:
            return np.fromiter(values, np.int64, len(entries))

        def held_up(entry: Entry) -> int:
            return sum(way.sending for way in map(costs.ways.__getitem__, entry.incoming) if way.blocking)

        receiving = [held_up(entry) for entry in entries]
        takes = [
            ints(queues[e.incoming[n]] * self.ring if n < len(e.incoming) else self.nothing for e in entries)
            for n in range(max(len(entry.incoming) for entry in entries))
        ]
        gives = []
        idle = _Way(-1, 0, 0, False)
        for n in range(max(len(entry.outgoing) for entry in entries)):
            sent = [costs.ways[e.outgoing[n]] if n < len(e.outgoing) else idle for e in entries]
            blocking = np.array([way.blocking for way in sent])
            gives.append(
                _Given(
                    ints(queues[e.outgoing[n]] * self.ring if n < len(e.outgoing) else self.nowhere for e in entries),
                    ints(way.wire if way.wire >= 0 else costs.wires for way in sent),
                    ints(way.sending for way in sent),
                    ints(way.latency for way in sent),
                    blocking if blocking.any() else None,
                )
            )
        return _Group(
            np.array(numbers),
            ints(self.shifts[number] for number in numbers),
            ints(self.job.devices[entry.station] for entry in entries),
            ints(costs.times[number] for number in numbers),
            ints(receiving) if any(receiving) else None,
            takes,
            gives,
            updates,
        )

    @property
    def makespan(self) -> int:
        """End of the last action so far."""
        return int(self.last.max())

    def execute(self, marks: Sequence[int]) -> dict[int, _Ints]:
        """Go through all segments. **Returns:** for each marked micro-batch, the end of its gradient at every stage."""
        per_update = max(1, self.job.group // self.job.length)
        found: dict[int, _Ints] = {}
        seen: dict[bytes, tuple[int, int]] = {}
        last: list[_Ints] = []
        segment = 0
        while segment < self.job.segments:
            first = segment * self.job.length
            inside = [mark - first for mark in marks if first <= mark < first + self.job.length]
            wanted = sorted({*inside, self.job.length - 1})
            ends = _Segment(self, (segment + 1) % per_update == 0).execute(wanted)
            found |= {first + mark: ends[mark] for mark in inside}
            last.append(ends[self.job.length - 1])
            segment += 1
            if self.job.segments == 1 or segment % per_update:
                continue
            key = _digest(self.free - self.free[0], np.maximum(self.wires - self.free[0], _NEVER))
            if key in seen:
                before, then = seen[key]
                period, added = segment - before, int(self.free[0]) - then
                times = (self.job.segments - segment) // period
                for mark in marks:
                    ahead, rest = divmod(mark // self.job.length - before, period)
                    # Marks of synchronous schedules are last micro-batches.
                    if mark not in found and mark < first + (1 + times * period) * self.job.length:
                        found[mark] = last[before + rest] + ahead * added
                self._skip(times * added)
                segment += times * period
                seen.clear()
                last += [last[-1]] * (times * period)
            else:
                seen[key] = segment, int(self.free[0])
        return found

    def _skip(self, quanta: int) -> None:
        for times in (self.free, self.wires, self.last, self.tokens):
            times[times > _NEVER // 2] += quanta

    def turn(self, turn: int, ends: int, keep: dict[int, list[tuple[int, _Ints]]], mark: bool) -> _Ints | None:
        """One round of all entries.

        **Arguments:** `keep`: marked micro-batches, each with a list for what is found; `mark`: whether to return the
        ends of all gradients.
        """
        every = np.zeros(self.stages, np.int64) if mark else None
        for group in self.groups:
            chosen = group.at_work(turn, self.job.length, ends)
            if chosen is None:
                continue
            end = self._act(group, chosen, (turn - group.shift[chosen]) & (self.ring - 1))
            if not isinstance(chosen, slice):  # updates
                continue
            if every is not None:
                places = self.place[group.numbers[chosen]]
                every[places[places >= 0]] = end[places >= 0]
            for micro, ended in keep.items():
                low, high = np.searchsorted(group.shift[chosen], (turn - micro, turn - micro + 1))
                places = self.place[group.numbers[chosen]]
                ended += [(int(places[n]), end[n]) for n in range(low, high) if places[n] >= 0]
        return every

    def _act(self, group: _Group, chosen: slice | _Ints, ring: _Ints) -> _Ints:
        device = group.device[chosen]
        begin = self.free[device]
        if group.receiving is not None:
            begin += group.receiving[chosen]
        for queue in group.takes:
            np.maximum(begin, self.tokens[queue[chosen] + ring], out=begin)
        end: _Ints = begin + group.time[chosen]
        now = end
        for given in group.gives:
            wire = given.wire[chosen]
            sent = np.maximum(now, self.wires[wire]) + given.sending[chosen]
            self.wires[wire] = sent
            self.wires[-1] = _NEVER
            self.tokens[given.queue[chosen] + ring] = sent + given.latency[chosen]
            if given.blocking is not None:
                now = np.where(given.blocking[chosen], sent, now)
        self.last[device] = end
        self.free[device] = now
        return end

    def state(self, turn: int) -> bytes:
        """Everything that later times depend on, relative to the first device."""
        queues = self.tokens.reshape(-1, self.ring)[:-1]
        there = queues[:, (turn + np.arange(self.ring)) & (self.ring - 1)]
        zero = self.free[0]
        return _digest(self.free - zero, np.maximum(self.wires - zero, _NEVER), np.maximum(there - zero, _NEVER))

    def roll(self, rounds: int) -> None:
        """Move messages to where those of so many micro-batches later are looked for."""
        queues = self.tokens.reshape(-1, self.ring)
        queues[:] = np.roll(queues, rounds % self.ring, axis=1)


class _Segment:
    """The pipeline fills, runs and empties once."""

    def __init__(self, run: _Run, updates: bool) -> None:
        self.run, self.job = run, run.job
        #: Micro-batches per update within the segment; 0 if it ends none.
        self.ends = min(self.job.group, self.job.length) if updates else 0

    def execute(self, marks: Sequence[int]) -> dict[int, _Ints]:
        """All rounds. **Returns:** for each marked micro-batch, the end of its gradient at every stage."""
        run, shifts, length = self.run, self.run.shifts, self.job.length
        full, stop, end = max(shifts), min(shifts) + length, max(shifts) + length
        kept: dict[int, list[tuple[int, _Ints]]] = {mark: [] for mark in marks}
        seen: dict[bytes, tuple[int, int]] = {}
        turn, looking = min(shifts), True
        while turn < end:
            # While all entries are at work, what repeats goes on repeating.
            if looking and full <= turn < stop and (turn - full) % max(1, self.ends) == 0:
                key = run.state(turn)
                if key in seen:
                    turn, looking = self._skip(turn, stop, *seen[key], kept), False
                    continue
                seen[key] = turn, int(run.free[0])
            run.turn(turn, self.ends, kept, mark=False)
            turn += 1
        return {mark: self._array(ended) for mark, ended in kept.items()}

    def _skip(self, turn: int, stop: int, before: int, then: int, kept: dict[int, list[tuple[int, _Ints]]]) -> int:
        """Skip as many periods as fit. **Returns:** the round to go on with."""
        run, period = self.run, turn - before
        added = int(run.free[0]) - then
        times = (stop - turn) // period - 1
        if times < 1:
            return turn
        # One more period, in which the ends of all gradients are noted: those of skipped rounds follow from them.
        noted = [run.turn(turn + n, self.ends, kept, mark=True) for n in range(period)]
        begin, skipped = turn + period, times * period
        for number, place in enumerate(run.place):
            if place < 0:
                continue
            for micro, ended in kept.items():
                at = micro + run.shifts[number]
                if begin <= at < begin + skipped:
                    ahead, rest = divmod(at - turn, period)
                    row = noted[rest]
                    assert row is not None
                    ended.append((int(place), row[place] + ahead * added))
        run._skip(times * added)
        run.roll(skipped)
        return begin + skipped

    def _array(self, ended: list[tuple[int, _Ints]]) -> _Ints:
        found = np.zeros(self.run.stages, np.int64)
        for place, end in ended:
            found[place] = end
        return found


def _digest(*arrays: _Ints) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.digest()


def _marks(job: _Job) -> tuple[int, ...]:
    """The micro-batches between which the interval is taken; none where the whole run is."""
    updates = job.micros // job.group
    if updates < 4:
        return ()
    first, last = (updates - 1) // 4, (3 * (updates - 1)) // 4
    return (first + 1) * job.group - 1, (last + 1) * job.group - 1


def _interval(job: _Job, marks: Sequence[int], ends: dict[int, _Ints], makespan: int, costs: _Costs) -> float:
    if not marks:
        found: float = costs.value(makespan) / job.micros
        return found
    between = int((ends[marks[1]] - ends[marks[0]]).max())
    found = costs.value(between) / (marks[1] - marks[0])
    return found


def _in_flight(job: _Job, passes: _Passes) -> int:
    """The most micro-batches whose forward has begun and whose gradient has not ended."""
    forward, gradient = job.entries[passes.forward], job.entries[passes.gradient]
    most = 1 + gradient.offset - forward.offset - (passes.gradient < passes.forward)
    return min(job.length, max(1, most))


def _staleness(job: _Job, passes: _Passes) -> float:
    """Updates between forward and gradient, on average over the second half of all micro-batches."""
    if passes.update is None or job.segments > 1:
        return 0.0
    forward, gradient = job.entries[passes.forward], job.entries[passes.gradient]
    number_of_update, update = passes.update, job.entries[passes.update]
    micros = np.arange(job.micros // 2, job.micros)

    def made(offset: int, number: int) -> _Ints:
        """Updates made before an entry's action for each micro-batch."""
        behind = micros + offset - update.offset + (number_of_update < number)
        counts: _Ints = np.clip(behind, 0, job.micros) // job.group
        return counts

    late = made(gradient.offset, passes.gradient) - made(forward.offset, passes.forward)
    return int(late.sum()) / len(micros)
