"""Follows a schedule with the stations of this process. Inline it holds all of them, distributed a few.

One micro-batch through one process, in the order of the code:

    step(x, y)                    a batch enters: cut into micro-batches, or learned of by message        1
      for entry of the schedule   in the listed order, for the micro-batch that its offset says           2
        due?                      `per` and `when`, from the micro-batch alone                            3
        take                      what the entry's ports name; waits for other processes                  4
        operation                 of the station, found when the engine was built                         5
        give                      to stations here or elsewhere; known losses ride along                  6
        record                    one event                                                               7
      collect                     batches whose last micro-batch is through everywhere                    8

The loop is the same inline and distributed, which is why both give the same weights: what differs is only who fills
the mail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from ..errors import ConfigError, DataError, NonFinite, PeerLost, StageFailed, TransportError, UnlatchError
from ..io.space import bytes_text
from ..nn.device import CPU, Device
from ..nn.tree import aligned, batch_size, map_tensors, split_batch
from ..schedule import OUTSIDE, Entry, Kind, Schedule
from ..transport.mail import Mail, Message, Micro
from ..transport.memory import TAKES_LESS, is_out_of_memory, most_held
from ..transport.wire import dense_tree
from .compression import Compression
from .events import Event, Recorder
from .replicas import Columns
from .stage import Stage
from .station import SENT, Operation, Station
from .timing import Timing

__all__ = ["Engine", "Finished", "Order"]

#: Plain numbers that say how far an engine is.
_PROGRESS = (
    "batches",
    "_origin",
    "_fed",
    "_done",
    "_update",
    "_in_update",
    "_batch_loss",
    "_batch_count",
    "_batch_samples",
)


class Order(StrEnum):
    """What the leading process tells all others instead of a batch."""

    END = "end"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that is through: its mean loss, and by how many updates the local stations were behind.

    **Arguments:** `weight`: what the loss is a mean over: samples, unless the loss function counts something else.
    """

    batch: int
    loss: float
    samples: int
    staleness: dict[int, int]
    weight: float


@dataclass(slots=True)
class _Task:
    """An entry of a station of this process with everything that it needs."""

    entry: Entry
    station: Station
    work: Operation
    takes: tuple[tuple[str, int], ...]
    gives: tuple[tuple[str, int], ...]
    always: bool
    once_per_update: bool
    is_forward: bool
    is_gradient: bool


class Engine:
    """Executes entries in schedule order.

    **Arguments:**

    - `stations`: those of this process, by number.
    - `schedule`: over all stations of the network.
    - `mail`: messages in and out.
    - `devices`: for each station of the schedule its process; all here by default.
    - `microbatches`: parts a batch is cut into (fewer when it has fewer samples).
    - `accumulate`: batches per update.
    - `mean_loss`: whether the loss is a mean over samples, so that parts are weighted by their size.
    - `fed`: whether this process is fed by its caller although the first station is elsewhere.
    - `device`: where its stations compute.
    - `landed`: makes of what a message holds what stations take, where tensors come to the device by themselves.
    - `columns`: the replicas of the network, each of which is given some rows of every micro-batch.
    """

    def __init__(
        self,
        stations: Mapping[int, Station],
        schedule: Schedule,
        mail: Mail,
        *,
        devices: Sequence[int] = (),
        microbatches: int = 1,
        accumulate: int = 1,
        mean_loss: bool = True,
        fed: bool = False,
        recorder: Recorder | None = None,
        device: Device = CPU,
        landed: Callable[[Any], Any] | None = None,
        columns: Columns | None = None,
    ) -> None:
        self.columns = columns or Columns()
        self.stations = {index: stations[index] for index in sorted(stations)}
        self.schedule = schedule
        self.mail = mail
        self.microbatches = microbatches
        self.accumulate = accumulate
        self.mean_loss = mean_loss
        self.device = device
        self._landed = landed
        self._recorder = recorder or Recorder()
        self._timing = Timing(self._recorder) if device.runs_ahead else None
        self._clock = time.perf_counter if self._timing is None else device.clock
        self.batches = 0
        #: Whether gradients are looked at after every entry, so that one that is not finite is traced to its batch.
        self.careful = False
        #: What makes messages smaller, if anything does.
        self.compression: Compression | None = None
        #: The process of each station.
        self.devices = devices or (0,) * schedule.stations
        operations = {
            index: self.columns.operations(station, schedule, mail.send) for index, station in self.stations.items()
        }
        self._tasks = [self._resolve(entry, operations) for entry in schedule.entries]
        own = [(task, entry) for task, entry in zip(self._tasks, schedule.entries, strict=True) if task is not None]
        self._inlets = [(p.name, e.station) for _, e in own for p in e.takes if p.station == OUTSIDE]
        self.lowest = min(self.stations)
        self.holds_first = 0 in self.stations
        #: Whether the caller of this process is asked for batches.
        self.leads = self.holds_first or fed
        self._opening = None if self.holds_first else _opening(schedule, self.devices, self.lowest)
        self._followers = _followers(schedule, self.devices, self.devices[self.lowest])
        self._micros: dict[int, Micro] = {}
        self._own: dict[int, Micro] = {}
        self._newest: Micro | None = None
        self._origin = self._fed = self._done = 0
        self._update = self._in_update = 0
        #: By id of a micro-batch its mean loss, which `float` reads.
        self._losses: dict[int, Any] = {}
        self._counts: dict[int, float] = {}
        self._batch_loss, self._batch_count, self._batch_samples = 0.0, 0.0, 0
        #: Micro-batches and batches that were fed.
        self.handled = (0, 0)
        for station in self.stations.values():
            station.share_losses(self._losses, self._counts)

    def _resolve(self, entry: Entry, operations: Mapping[int, Mapping[Kind, Operation]]) -> _Task | None:
        station = self.stations.get(entry.station)
        if station is None:
            return None
        known = operations[entry.station]
        work = known.get(entry.kind)
        if work is None:
            raise ConfigError(
                f"the schedule lists {entry}, but station {entry.station} ({type(station).__name__}) knows no "
                f"{entry.kind}: expected one of {', '.join(known)}"
            )
        return _Task(
            entry,
            station,
            work,
            tuple((name, entry.station) for name, _ in entry.takes),
            tuple((name, receiver) for name, receiver in entry.gives),
            always=entry.when is None and entry.per == "micro",
            once_per_update=entry.per == "update",
            is_forward=entry.kind.cost == "forward",
            is_gradient=entry.kind.cost in ("backward", "weight gradient"),
        )

    def wrap(self, around: Callable[[Station, Entry, Operation], Operation]) -> None:
        """Replace what stations do for each entry by what `around` makes of it; before the first batch."""
        for task in self._tasks:
            if task is not None:
                task.work = around(task.station, task.entry, task.work)

    def compress(self, compression: Compression) -> None:
        """Let messages travel in fewer bytes; before the first batch, and after whatever else wraps operations."""
        self.compression = compression
        self.wrap(compression.around)

    def place(self) -> dict[str, Any]:
        """What an engine is given that works in the same place as this one."""
        return {"device": self.device, "landed": self._landed}

    @property
    def recorder(self) -> Recorder:
        """What happened so far."""
        if self._timing is not None:
            self._timing.settle()
        return self._recorder

    @property
    def recorded(self) -> Recorder:
        """What is known of it already: nobody waits for a device."""
        return self._recorder

    @property
    def stages(self) -> dict[int, Stage]:
        """The stages that live in this process, by station."""
        return {index: s.stage for index, s in self.stations.items() if s.stage is not None}

    @property
    def originals(self) -> dict[int, Station]:
        """The stations of this process that are of the first column: its weights and statistics are what counts."""
        return {index: station for index, station in self.stations.items() if station.column == 0}

    @property
    def original_stages(self) -> dict[int, Stage]:
        """The stages of those."""
        return {index: stage for index, stage in self.stages.items() if self.stations[index].column == 0}

    # -------------------------------------------------------------- one batch

    def step(self, x: Any = None, y: Any = None) -> list[Finished] | Order:
        """Feed one batch. Only a process that `leads` looks at `x` and `y`; the others learn of it by message.

        **Returns:** the batches that finished; or an order of the leading process, and then nothing was fed.
        """
        first = None
        if self._opening is not None:
            first = self.mail.peek(*self._opening)
            if first.micro is None:
                order = Order(first.control or Order.END)
                self.announce(order)
                return order
        if self.leads:
            count = self._enter(x, y)
        else:
            assert first is not None
            assert first.micro is not None
            count = first.micro.count
        self._perform_all(self.schedule.feed(self._fed, count))
        self._fed += count
        self._newest = self._micros[self._fed - 1]
        self.batches += 1
        self.handled = (self.handled[0] + count, self.handled[1] + 1)
        finished = self._collect(self._fed - self.schedule.depth)
        if self.schedule.depth == 0:
            self._restart()
        return finished

    def announce(self, order: Order) -> None:
        """Tell the processes that learn of batches from this one what to do before the next batch."""
        if self._opening is not None:
            message = self.mail.take(*self._opening)
            if message.micro is not None:
                raise DataError(
                    f"the loader of stage {self.lowest} ends after {self.batches} batches, before that of stage 0: "
                    'with data="build" every rank needs a loader of the same batches'
                )
        for name, station in self._followers:
            self.mail.send(Message(name, station, control=order))

    def drain(self) -> list[Finished]:
        """Finish every batch under way; the gradients of an incomplete accumulation are applied as they are."""
        self._perform_all(self.schedule.drain(self._fed))
        if self._newest is not None and not self._newest.ends:
            last = replace(self._newest, ends=True)
            for task in self._tasks:
                if task is not None and task.once_per_update and task.entry.due(last):
                    self._perform(task, last)
        self._newest = None
        if self._in_update:
            self._update, self._in_update = self._update + 1, 0
        finished = self._collect(self._fed)
        self._restart()
        return finished

    def end_epoch(self, metric: float | None = None) -> None:
        """Move learning rates on that change once per epoch: of each stage when it has applied all that was fed."""
        newest = self._newest
        due = newest.update + newest.ends if newest is not None else 0
        for station in self.stations.values():
            station.end_epoch(metric, due)

    @property
    def between_updates(self) -> bool:
        """Whether the next batch begins an update; only a process that cuts batches knows."""
        return self._in_update == 0

    @property
    def next_update(self) -> int:
        """The first update that no batch fed so far contributes to."""
        return self._update + (self._in_update > 0)

    @property
    def under_way(self) -> int:
        """Batches that were fed and are not finished, as far as this process knows of them."""
        return len({micro.batch for micro in self._micros.values()})

    def counters(self) -> dict[str, int]:
        """How far the run is; meaningful only while the pipeline is empty."""
        return {"batches": self.batches, "micros": self._origin, "updates": self._update}

    def restore_counters(self, counters: Mapping[str, int]) -> None:
        """Continue counting where a checkpoint left off."""
        self.batches, self._origin, self._update = (counters[k] for k in ("batches", "micros", "updates"))
        for stage in self.stages.values():
            stage.updater.version = self._update
            stage.forget_scale()
        if self.compression is not None:
            self.compression.forget()

    def state(self) -> dict[str, Any]:
        """Everything between two batches but messages, as a tree of plain values and of the tensors in use."""
        micros = {position: asdict(micro) for position, micro in self._micros.items()}
        return {
            "stations": {index: station.state() for index, station in self.stations.items()},
            "rounding": {i: self.compression.state(i) for i in self.stations} if self.compression is not None else {},
            "progress": {name: getattr(self, name) for name in _PROGRESS},
            "micros": micros,
            "newest": asdict(self._newest) if self._newest is not None else None,
            "losses": {micro: float(loss) for micro, loss in self._losses.items()},
            "counts": dict(self._counts),
            "recorder": self._recorder.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where the engine was whose `state` this is; it was built alike. The tensors are used as they are."""
        for index, station in self.stations.items():
            station.load(state["stations"][index])
            if self.compression is not None:
                self.compression.load(index, state["rounding"][index])
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])
        self._own.clear()
        self._micros.clear()
        self._micros.update({position: Micro(**micro) for position, micro in state["micros"].items()})
        self._newest = Micro(**state["newest"]) if state["newest"] is not None else None
        # Stations share these very dictionaries.
        self._losses.clear()
        self._losses.update(state["losses"])
        self._counts.clear()
        self._counts.update(state["counts"])
        self._recorder.load(state["recorder"])

    def route(self, path: str | None = None) -> dict[int, Any]:
        """What evaluation runs through, by stage: the network itself, or another path that the method knows."""
        stages = self.schedule.stages
        own = {index: station.route(path) for index, station in self.stations.items() if index < stages}
        if any(part is None for part in own.values()):
            raise ConfigError(f'this method knows no path {path!r} to evaluate: only "serial", the network itself')
        return own

    def method_statistics(self) -> list[Any]:
        """What the stations of this process measured about themselves; of replicas, the first."""
        seconds = self.recorder.seconds
        found = [s.measured(seconds.get(index, {}), *self.handled) for index, s in self.originals.items()]
        return [one for one in found if one is not None]

    # ----------------------------------------------------------- micro-batches

    def _enter(self, x: Any, y: Any) -> int:
        """Cut a batch into micro-batches and hand each to the stations that take data; give their number."""
        total = batch_size(x)
        parts = self.columns.parts(total, self.microbatches)
        x = self.device.here(x)
        # It leaves this process when the sender gets to it; by then the caller may use its memory for the next one.
        leaves = len(self.stations) < self.schedule.stations
        y = map_tensors(Tensor.clone, y) if leaves else self.device.here(y)
        pieces = [map_tensors(aligned, piece) for piece in split_batch((x, y), parts)]
        self._in_update += 1
        ends = self._in_update == self.accumulate
        for index, (xi, yi) in enumerate(pieces):
            size = batch_size(xi)
            micro = Micro(
                id=self._origin + self._fed + index,
                batch=self.batches,
                index=index,
                count=len(pieces),
                size=size,
                scale=size / total if len(pieces) > 1 and self.mean_loss else 1.0,
                update=self._update,
                ends=ends and index == len(pieces) - 1,
                fresh=self.stations[self.lowest].recognise(xi),
            )
            if self._opening is None:
                self._micros[self._fed + index] = micro
            else:
                self._own[self._fed + index] = micro
            for name, station in self._inlets:
                self.mail.post(Message(name, station, micro, (xi, yi)))
        if ends:
            self._update, self._in_update = self._update + 1, 0
        return len(pieces)

    def _learn(self, number: int) -> Micro:
        """The micro-batch that another process tells of; its message is left where it is."""
        assert self._opening is not None, "the process with the first station knows all micro-batches"
        micro = self.mail.peek(*self._opening).micro
        if micro is None or micro.id != self._origin + number:
            got = "the end of the data" if micro is None else f"that of {micro} (id {micro.id})"
            name, station = self._opening
            raise TransportError(
                f"stage {station} expected the {name} message of micro-batch {self._origin + number}, got {got}"
            )
        own = self._own.pop(number, None)
        if own is not None and own != micro:
            raise DataError(
                f"stage {self.lowest} is fed {own} ({own.size} samples), stage 0 {micro} ({micro.size} samples): with "
                'data="build" every rank needs a loader of the same batches'
            )
        self._micros[number] = micro
        return micro

    def _collect(self, done: int) -> list[Finished]:
        """Report the batches whose last part is now through everywhere, the same ones in every process."""
        finished = []
        for number in range(self._done, done):
            micro = self._micros.pop(number)
            count = self._counts.pop(micro.id, None)
            self._batch_loss += (micro.scale if count is None else count) * float(self._losses.pop(micro.id))
            self._batch_count += count or 0.0
            self._batch_samples += micro.size
            behind = {self.stations[number].index: n for number, n in self._recorder.behind(micro.id).items()}
            if micro.index == micro.count - 1:
                loss = self._batch_loss if count is None else self._batch_loss / (self._batch_count or 1.0)
                weight = self._batch_samples if count is None else self._batch_count
                finished.append(Finished(micro.batch, loss, self._batch_samples, behind, weight))
                self._batch_loss, self._batch_count, self._batch_samples = 0.0, 0.0, 0
        self._done = max(self._done, done)
        return finished

    def _restart(self) -> None:
        """The pipeline is empty: the schedule's ids count from 0 again."""
        self._origin += self._fed
        self._fed = self._done = 0

    # ----------------------------------------------------------------- entries

    def _perform_all(self, turns: Iterable[tuple[int, int]]) -> None:
        tasks, micros = self._tasks, self._micros
        for number, position in turns:
            task = tasks[number]
            if task is None:
                continue
            micro = micros.get(position) or self._learn(position)
            if task.always or task.entry.due(micro):
                self._perform(task, micro)

    def _perform(self, task: _Task, micro: Micro) -> None:
        station, losses, counts = task.station, self._losses, self._counts
        taken = []
        for name, receiver in task.takes:
            try:
                message = self.mail.take(name, receiver, micro)
            except PeerLost as error:
                raise PeerLost(f"{error}. {station.title} waited for the {name} message of {micro}") from None
            if message.scalars is not None:
                losses[micro.id] = message.scalars["loss"]
                if "count" in message.scalars:
                    counts[micro.id] = message.scalars["count"]
            taken.append(message.payload if self._landed is None else self._landed(message.payload))
        clock, version = self._clock, station.version
        start = clock()
        try:
            given = task.work(micro, *taken)
            if self.careful:
                station.check_gradients()
        except NonFinite as error:
            shared = self.accumulate - 1 if task.once_per_update and not self.careful else 0
            error.batches = max(0, micro.batch - shared), micro.batch
            raise
        except UnlatchError:
            raise
        except Exception as error:
            raise _failure(task, micro, error) from error
        end = clock()
        number = micro.update if task.once_per_update else micro.id
        if task.is_forward:
            version = station.seen
            self._recorder.forward(station.number, micro.id, version)
        elif task.is_gradient:
            self._recorder.gradient(station.number, micro.id, version)
        event = Event(station.number, task.entry.kind, number, version, start, end, station.kept_bytes)
        (self._timing or self._recorder).add(event)
        if task.gives:
            loss = losses.get(micro.id)
            scalars = None if loss is None else {"loss": loss}
            if scalars is not None and micro.id in counts:
                scalars["count"] = counts[micro.id]
            for (name, receiver), payload in zip(task.gives, given, strict=True):
                if payload is SENT:
                    continue
                self.mail.send(Message(name, receiver, micro, dense_tree(payload), station.version, scalars))


def _failure(task: _Task, micro: Micro, error: Exception) -> StageFailed:
    kind, subject = task.entry.kind, f"update {micro.update}" if task.once_per_update else str(micro)
    if kind.cost in ("auxiliary", "none"):
        # The letters of a method tell little by themselves.
        subject = f"the auxiliary work {kind} ({getattr(task.work, '__name__', kind)}) of {subject}"
    elif kind.cost != "update":
        subject = f"the {'forward' if kind.cost == 'forward' else 'backward'} of {subject}"
    text = f"{task.station.title} failed in {subject}: {type(error).__name__}: {error}"
    if is_out_of_memory(error):
        kept, held = bytes_text(task.station.kept_bytes), bytes_text(most_held())
        text += f". Out of memory: it keeps {kept} for batches under way, its process held {held} at most; {TAKES_LESS}"
    return StageFailed(text)


def _first_entries(schedule: Schedule, devices: Sequence[int]) -> dict[int, Entry]:
    """For each process, the first thing that it does with a micro-batch."""
    found: dict[int, Entry] = {}
    for entry in sorted(schedule.entries, key=lambda entry: entry.offset):
        found.setdefault(devices[entry.station], entry)
    return found


def _opening(schedule: Schedule, devices: Sequence[int], station: int) -> tuple[str, int]:
    """The message from which the process of a station learns of a micro-batch."""
    entry = _first_entries(schedule, devices)[devices[station]]
    port = next((p for p in entry.takes if p.station != OUTSIDE and devices[p.station] != devices[station]), None)
    if port is None or entry.when is not None or entry.offset > 0:
        raise ConfigError(
            f"the process of station {station} begins with {entry} at offset {entry.offset}: expected an entry that "
            "takes a message of another process for every micro-batch, in the slot in which it enters: so a process "
            "learns of it"
        )
    return port.name, entry.station


def _followers(schedule: Schedule, devices: Sequence[int], own: int) -> list[tuple[str, int]]:
    """Messages from which other processes learn of micro-batches and which this one sends."""
    found = []
    for device, entry in _first_entries(schedule, devices).items():
        if device == devices[0]:
            continue
        name, station = _opening(schedule, devices, entry.station)
        sender = next(p.station for p in entry.takes if p.name == name)
        if devices[sender] == own:
            found.append((name, station))
    return found
