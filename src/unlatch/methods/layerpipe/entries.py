"""From placed tasks to a schedule: what each station does in which slot, and which tensors go where.

One micro-batch of one layer, by the slots of the plan; homes and places away from home are stations of their own:

    T   tells every device that a micro-batch has entered slot 0           takes or gives a note
    F   forward, at home                                  slot of F        takes and gives an input
    V   ships weights to a place that needs them          one before use   gives weights
    H   the elementwise derivative, where it is a task    slot of H        takes raw gradients, gives the gradient
    I   input gradient, or a share of its rows            slot of D        takes gradients, gives one (B: both at once)
    W   weight gradient, at home or away                  slot of G        takes what it needs, away: gives wgrad
    R   receives a weight gradient that was made away     one after G      takes wgrad
    U   update, at home, when the slot is over            slot of G, or R  once per update

A tensor goes to each device once: whoever uses it there first takes the message and hands it to others on the spot.
Without T a device would meet a micro-batch when its first task comes, slots after others did, and what one step of the
run has done would depend on where it ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...plan.dataflow import Dataflow, Place, Step, Work
from ...schedule import OUTSIDE, Entry, Kind, Periodic, Port

__all__ = ["Give", "Job", "TaskLayout"]

SHIP_WEIGHTS = "V"
TELL = Kind("T")
ELEMENTWISE = Kind("H", "input gradient")
RECEIVE = Kind("R", "weight gradient")


class Give(NamedTuple):
    """A tensor for a station: made by the job, or handed on as it came."""

    tensor: str
    station: int
    device: int
    made: bool


@dataclass(frozen=True)
class Job:
    """An entry with what its operation must know.

    **Arguments:**

    - `step`: which work, with the tensors that it uses, in order; some were taken by an earlier job of the station.
    - `taken`: those that come with its own messages.
    """

    entry: Entry
    step: Step
    taken: tuple[str, ...] = ()
    gives: tuple[Give, ...] = ()

    @property
    def work(self) -> Work:
        return self.step.work

    @property
    def uses(self) -> tuple[str, ...]:
        return self.step.uses


@dataclass
class _Draft:
    """A job before it is known who sends what to whom."""

    kind: Kind
    station: int
    step: Step
    takes: list[tuple[str, int]] = field(default_factory=list)
    gives: list[Give] = field(default_factory=list)

    @property
    def device(self) -> int:
        return self.step.place.device


class TaskLayout:
    """Stations, their jobs, and the schedule that they make.

    **Arguments:** `flow`: which task needs what; `devices`: how many there are.
    """

    def __init__(self, flow: Dataflow, devices: int) -> None:
        self.flow = flow
        homes = [(layer, tasks.home) for layer, tasks in enumerate(flow.layers)]
        away = {(step.layer, step.place.device) for step in flow.steps} - set(homes)
        #: Layer and device of each station: the homes of all layers first.
        self.stations: list[tuple[int, int]] = [*homes, *sorted(away)]
        number = {place: number for number, place in enumerate(self.stations)}
        steps = [step for step in flow.steps if step.work == "tell"]
        steps += [step for device in range(devices) for step in self._of_device(device)]
        drafts = [_Draft(self._kind(step), number[step.layer, step.place.device], step) for step in steps]
        _connect(drafts)
        self.jobs = [_finished(draft) for draft in drafts]
        self.schedule = Periodic(len(homes), tuple(job.entry for job in self.jobs), hop=0)

    @property
    def devices(self) -> list[int]:
        """The device of each station."""
        return [device for _, device in self.stations]

    def jobs_of(self, station: int) -> list[Job]:
        """What one station does."""
        return [job for job in self.jobs if job.entry.station == station]

    def uses(self, tensor: str, station: int) -> int:
        """How often a station uses a tensor."""
        return sum(job.uses.count(tensor) for job in self.jobs_of(station))

    def _of_device(self, device: int) -> Iterator[Step]:
        """Forwards upwards; then what others wait for, downwards; then weight gradients, those of others first."""
        here = [step for step in self.flow.steps if step.place.device == device]
        layers = self.flow.layers
        late: list[Step] = []
        for layer, tasks in enumerate(layers):
            if tasks.home != device:
                continue
            received = [step for step in here if step.layer == layer and step.work == "receive"]
            yield from received
            gradient = received[0].place if received else Place(device, tasks.weight_gradient.slot)
            update = Step("update", layer, gradient)
            if received:
                yield update
            else:
                late.append(update)
            yield from (step for step in here if step.layer == layer and step.work == "forward")
            yield from (step for step in here if step.layer == layer and step.work == "ship")
        # Steps are listed downwards from here on.
        yield from (step for step in here if step.work in ("elementwise", "input_gradient"))
        gradients = [step for step in here if step.work == "weight_gradient"]
        yield from sorted(gradients, key=lambda step: layers[step.layer].home == device)
        yield from late

    def _kind(self, step: Step) -> Kind:
        if step.work in ("input_gradient", "weight_gradient") and self.flow.layers[step.layer].fused:
            return Kind.B
        if step.work == "ship":
            return Kind(f"{SHIP_WEIGHTS}{step.receiver}")
        return _KINDS[step.work]


_KINDS: dict[Work, Kind] = {
    "tell": TELL,
    "forward": Kind.F,
    "elementwise": ELEMENTWISE,
    "input_gradient": Kind.I,
    "weight_gradient": Kind.W,
    "receive": RECEIVE,
    "update": Kind.U,
}


def _connect(drafts: Sequence[_Draft]) -> None:
    """Say who takes and gives what."""
    users: dict[str, list[_Draft]] = {}
    for draft in sorted(drafts, key=lambda draft: draft.step.place.slot):
        for tensor in dict.fromkeys(draft.step.uses):
            users.setdefault(tensor, []).append(draft)
    for draft in drafts:
        receiver = draft.step.receiver
        for tensor in draft.step.makes:
            found = [u for u in users.get(tensor, []) if u is not draft and receiver in (None, u.device)]
            for device in sorted({u.device for u in found}):
                _hand_over(draft, tensor, [u for u in found if u.device == device])


def _hand_over(maker: _Draft, tensor: str, users: Sequence[_Draft]) -> None:
    """From its maker to the stations of one device."""
    giver, made = maker, True
    for station in dict.fromkeys(user.station for user in users):
        first = next(user for user in users if user.station == station)
        if station == maker.station:
            continue
        first.takes.append((tensor, giver.station))
        giver.gives.append(Give(tensor, station, first.device, made))
        if giver is maker and first.device != maker.device:
            giver, made = first, False


def _finished(draft: _Draft) -> Job:
    takes = tuple(Port(tensor, station) for tensor, station in draft.takes)
    taken = tuple(tensor for tensor, _ in draft.takes)
    if draft.step.work == "forward" and "input/0" in draft.step.makes:
        takes, taken = (Port("data", OUTSIDE), *takes), ("input/0", *taken)
    gives = tuple(Port(give.tensor, give.station) for give in draft.gives)
    per: Literal["micro", "update"] = "update" if draft.kind is Kind.U else "micro"
    entry = Entry(draft.kind, draft.station, draft.step.place.slot, takes, gives, per=per)
    return Job(entry, draft.step, taken, tuple(draft.gives))
