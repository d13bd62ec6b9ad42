"""What stations with auxiliary variables do with a micro-batch, in order.

One slot, all stages at once. `d` is 0, or K-k under replay, where each stage handles a batch one slot after the next
stage did and is given the gradient found there. Phases go up or down the stages; entries of one phase stand together.

     1  D    up    raw data, announced to every process               offset 0     takes data or batch, gives batch
     2  N    up    new samples: a pass that stores true inputs         0           takes and gives introduced
     3  Fs   up    plain forward of a serial batch                     0           takes and gives forward
     4  Bs   down  plain backward, then Us, X (learn its input), V     0           takes and gives backward
     5  P    up    predicts the stage's input                          d           gives input down (not under replay)
     6  F    up    the stage, from the predicted input                 d           gives state up (takes it to mix in)
     7  S    up    the mismatch with what the next stage started from  d           takes input
        Y    up    a trial backward, for multipliers made at once      d
        B    up    backward from the mismatch                          d           gives adjoint or input down
     8  M    up    a multiplier out of this gradient                   d           takes state, gives multiplier down
     9  B    up    the backward that counts, where 7 was a trial       d           takes multiplier
    10  Z    up    comparison with backpropagation                     d
    11  U    up    update of the stage (E before it: the true state)   d           once per update
    12  C    up    corrects the predicted input, then V                d (+1)      takes state
    13  R    down  sums of gradients of a shared network               0           takes and gives partial
        T    up    their totals, and the update of all copies          0           takes and gives total
    14  L    up    the synthesiser learns                              0           takes adjoint
    15  O    down  the loss, so that every process knows it            d           takes and gives loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...schedule import OUTSIDE, Entry, Kind, Periodic, Port
from ...schedule.entries import Moment
from ..local.stations import ADJOINT, LEARN, LOSS, LOSS_DOWN

__all__ = ["Borders", "border_schedule"]

DATA = Kind("D")
INTRODUCE = Kind("N", "auxiliary")
SERIAL_FORWARD = Kind("Fs", "forward")
SERIAL_BACKWARD = Kind("Bs", "backward")
SERIAL_UPDATE = Kind("Us", "update")
DISTIL = Kind("X", "auxiliary")
UPDATE_AUXILIARY = Kind("V", "auxiliary")
PREDICT = Kind("P", "auxiliary")
SEED = Kind("S", "auxiliary")
TRIAL = Kind("Y", "auxiliary")
MULTIPLY = Kind("M", "auxiliary")
PROBE = Kind("Z", "auxiliary")
ECHO = Kind("E+", "auxiliary")
CORRECT = Kind("C", "auxiliary")
REDUCE = Kind("R+", "auxiliary")
SPREAD = Kind("T+", "auxiliary")

#: Raw data, from process to process; the predicted input of a stage, to the stage below; the output of a stage, to the
#: stage above; a multiplier made within the iteration, down; gradients of a shared network, sums down and totals up;
#: states of a pass that introduces new samples.
BATCH, INPUT, STATE, MULTIPLIER = "batch", "input", "state", "multiplier"
PARTIAL, TOTAL, INTRODUCED = "partial", "total", "introduced"


@dataclass(frozen=True)
class Borders:
    """What a method with auxiliary variables does in each slot.

    **Arguments:**

    - `multiplier`: where multipliers come from: `"none"`, `"replay"`, `"synthesiser"`, `"rebuild"` or `"given"`.
    - `stores`: whether variables are stored per sample, so that new samples must be introduced.
    - `shared`: whether all predictions are taps of one network.
    - `shallow`: whether only the last stage is trained.
    - `builds`: whether every process reads its own data.
    - `echoes`: whether the last stage hears true states as well.
    - `probes`: whether gradients are compared with those of backpropagation now and then, and for which micro-batches.
    - `is_serial`: which micro-batches are trained by plain backpropagation; `None` for none at all.
    - `mixes`: in which micro-batches the true state is mixed into the predicted input; `None` for none at all.
    """

    multiplier: str = "none"
    stores: bool = False
    shared: bool = False
    shallow: bool = False
    builds: bool = False
    echoes: bool = False
    probes: Callable[[Moment], bool] | None = None
    is_serial: Callable[[Moment], bool] | None = None
    mixes: Callable[[Moment], bool] | None = None


def border_schedule(stages: int, borders: Borders) -> Periodic:
    """The schedule of one method with auxiliary variables.

    >>> " ".join(str(entry) for entry in border_schedule(2, Borders()).entries)
    '0D 1D 1P 0F 1F 0S 0B 1B 0U 1U 1C 1V 1O 0O'
    """
    return Periodic(stages, tuple(_Listing(stages, borders).entries()), hop=0)


class _Listing:
    def __init__(self, stages: int, borders: Borders) -> None:
        self.borders = borders
        self.last = stages - 1
        self.up = range(stages)
        self.down = range(stages - 1, -1, -1)
        self.replays = borders.multiplier == "replay"
        #: Stages that take part in parallel batches, and those whose input is predicted.
        self.busy = [self.last] if borders.shallow else list(self.up)
        self.predicted = [stage for stage in self.busy if stage > 0]

    def entries(self) -> Iterator[Entry]:
        """All phases in order."""
        yield from map(self._data, self.up)
        if self.borders.stores:
            fresh: Callable[[Moment], bool] = lambda moment: moment.fresh  # noqa: E731
            for stage in self.up:
                yield from self._parallel(self._passed(INTRODUCE, stage, INTRODUCED), fresh)
        if self.borders.is_serial is not None:
            yield from self._serial(self.borders.is_serial)
        for stage in self.predicted:
            tells = not self.replays and not self.borders.shallow
            yield from self._due(Entry(PREDICT, stage, gives=self._to(INPUT, stage - 1) if tells else ()))
        for stage in self.busy:
            yield from self._forward(stage)
        for stage in self.busy:
            yield from self._backward(stage)
        if self.borders.multiplier == "rebuild":
            yield from self._rebuild()
        if self.borders.probes is not None:
            for stage in self.busy:
                yield from self._due(Entry(PROBE, stage), self.borders.probes)
        for stage in self.busy:
            if self.borders.echoes and stage == self.last and stage > 0:
                yield from self._due(Entry(ECHO, stage, per="update"))
            yield from self._due(Entry(Kind.U, stage, per="update"))
        yield from self._correct()
        if self.borders.multiplier == "synthesiser":
            for stage in self.up[:-1]:
                yield from self._due(Entry(LEARN, stage, takes=self._to(ADJOINT, stage + 1)))
        for stage in self.down:
            yield from self._due(self._passed(LOSS_DOWN, stage, LOSS, step=-1))

    # ------------------------------------------------------------------- phases

    def _data(self, stage: int) -> Entry:
        outside = (Port("data", OUTSIDE),) if stage == 0 or self.borders.builds else ()
        return Entry(DATA, stage, 0, (*self._to(BATCH, stage - 1), *outside), self._to(BATCH, stage + 1))

    def _serial(self, is_serial: Callable[[Moment], bool]) -> Iterator[Entry]:
        for stage in self.up:
            found = self._passed(SERIAL_FORWARD, stage, "forward")
            yield replace(found, when=is_serial)
        for stage in self.down:
            yield replace(self._passed(SERIAL_BACKWARD, stage, "backward", step=-1), when=is_serial)
            yield Entry(SERIAL_UPDATE, stage, when=is_serial, per="update")
            if stage > 0:
                yield Entry(DISTIL, stage, when=is_serial)
                if not self.borders.shared:
                    yield Entry(UPDATE_AUXILIARY, stage, when=is_serial, per="update")

    def _forward(self, stage: int) -> Iterator[Entry]:
        gives = () if self.borders.shallow else self._to(STATE, stage + 1)
        entry = Entry(Kind.F, stage, gives=gives)
        mixes = self.borders.mixes if stage > 0 and not self.borders.shallow else None
        if mixes is None:
            yield from self._due(entry)
            return
        yield from self._due(entry, _negated(mixes))
        yield from self._due(replace(entry, takes=self._to(STATE, stage - 1)), mixes)

    def _backward(self, stage: int) -> Iterator[Entry]:
        if stage < self.last:
            yield from self._due(Entry(SEED, stage, takes=self._to(INPUT, stage + 1)))
        if self.borders.multiplier == "rebuild" and stage < self.last:
            if stage > 0:
                yield from self._due(Entry(TRIAL, stage))
            return
        gives: tuple[Port, ...] = ()
        if stage > 0 and self.replays:
            gives = self._to(INPUT, stage - 1)
        elif stage > 0 and self.borders.multiplier == "synthesiser":
            gives = self._to(ADJOINT, stage - 1)
        yield from self._due(Entry(Kind.B, stage, gives=() if self.borders.shallow else gives))

    def _rebuild(self) -> Iterator[Entry]:
        for stage in self.predicted:
            entry = Entry(MULTIPLY, stage, gives=self._to(MULTIPLIER, stage - 1))
            yield from self._with_state(entry)
        for stage in self.busy[:-1]:
            yield from self._due(Entry(Kind.B, stage, takes=self._to(MULTIPLIER, stage + 1)))

    def _correct(self) -> Iterator[Entry]:
        taken = self.borders.shallow or self.borders.multiplier == "rebuild"
        late = int(self.replays)
        for stage in self.predicted:
            entry = Entry(CORRECT, stage)
            yield from self._due(entry, late=late) if taken else self._with_state(entry, late)
            if not self.borders.shared:
                yield from self._due(Entry(UPDATE_AUXILIARY, stage, per="update"), late=late)
        if not self.borders.shared:
            return
        for stage in reversed(self.predicted):
            takes = self._to(PARTIAL, stage + 1) if stage < self.last else ()
            yield Entry(REDUCE, stage, 0, takes, self._shared(PARTIAL, stage - 1), per="update")
        for stage in self.predicted:
            takes = self._shared(TOTAL, stage - 1)
            yield Entry(SPREAD, stage, 0, takes, self._to(TOTAL, stage + 1), per="update")

    # -------------------------------------------------------------------- parts

    def _with_state(self, entry: Entry, late: int = 0) -> Iterator[Entry]:
        """An entry that takes the state from below, unless the forward has taken it already to mix it in."""
        taking = replace(entry, takes=self._to(STATE, entry.station - 1))
        mixes = self.borders.mixes
        if mixes is None:
            yield from self._due(taking, late=late)
            return
        yield from self._due(taking, _negated(mixes), late)
        yield from self._due(entry, mixes, late)

    def _due(self, entry: Entry, when: Callable[[Moment], bool] | None = None, late: int = 0) -> Iterator[Entry]:
        """An entry of parallel batches, at the offset of its stage."""
        offset = (self.last - entry.station if self.replays else 0) + late
        yield from self._parallel(replace(entry, offset=offset), when)

    def _parallel(self, entry: Entry, when: Callable[[Moment], bool] | None = None) -> Iterator[Entry]:
        is_serial = self.borders.is_serial
        if is_serial is None:
            yield replace(entry, when=when)
        elif when is None:
            yield replace(entry, when=_negated(is_serial))
        else:
            yield replace(entry, when=lambda moment: when(moment) and not is_serial(moment))

    def _passed(self, kind: Kind, stage: int, name: str, step: int = 1) -> Entry:
        """Takes a message from one neighbour and gives one of the same name to the other."""
        return Entry(kind, stage, takes=self._to(name, stage - step), gives=self._to(name, stage + step))

    def _to(self, name: str, stage: int) -> tuple[Port, ...]:
        return (Port(name, stage),) if 0 <= stage <= self.last else ()

    def _shared(self, name: str, stage: int) -> tuple[Port, ...]:
        return self._to(name, stage) if stage in self.predicted else ()


def _negated(condition: Callable[[Any], bool]) -> Callable[[Moment], bool]:
    return lambda moment: not condition(moment)
