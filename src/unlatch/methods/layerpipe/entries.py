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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...schedule import OUTSIDE, Entry, Kind, Periodic, Port
from .routes import LayerTasks, Place, Routes

__all__ = ["Give", "Job", "TaskLayout"]

SHIP_WEIGHTS = "V"
TELL = Kind("T")
ELEMENTWISE = Kind("H", "input gradient")
RECEIVE = Kind("R", "weight gradient")

Work = Literal["tell", "forward", "ship", "elementwise", "input_gradient", "weight_gradient", "receive", "update"]


class Give(NamedTuple):
    """A tensor for a station: made by the job, or handed on as it came."""

    tensor: str
    station: int
    device: int
    made: bool


@dataclass(frozen=True)
class Job:
    """An entry with what its operation must know: which work, and the tensors by name.

    **Arguments:**

    - `uses`: tensors that it needs, in order; some were taken by an earlier job of the station.
    - `taken`: those that come with its own messages.
    - `share`: of the rows, for an input gradient; the receiver, for weights.
    """

    entry: Entry
    work: Work
    uses: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    gives: tuple[Give, ...] = ()
    share: Place | None = None


@dataclass
class _Draft:
    """A job before it is known who sends what to whom."""

    kind: Kind
    station: int
    device: int
    slot: int
    work: Work
    uses: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)
    share: Place | None = None
    takes: list[tuple[str, int]] = field(default_factory=list)
    gives: list[Give] = field(default_factory=list)


class TaskLayout:
    """Stations, their jobs, and the schedule that they make.

    **Arguments:** `routes`: which task needs what; `devices`: how many there are.
    """

    def __init__(self, routes: Routes, devices: int) -> None:
        self.routes = routes
        homes = [(layer, tasks.home) for layer, tasks in enumerate(routes.layers)]
        away = {
            (layer, place.processor)
            for layer, tasks in enumerate(routes.layers)
            for place in _places(tasks)
            if place.processor != tasks.home
        }
        #: Layer and device of each station: the homes of all layers first.
        self.stations: list[tuple[int, int]] = [*homes, *sorted(away)]
        self._number = {place: number for number, place in enumerate(self.stations)}
        drafts = [*self._notes(), *(draft for device in range(devices) for draft in self._of_device(device))]
        self._connect(drafts)
        self.jobs = [_finished(draft) for draft in drafts]
        self.schedule = Periodic(len(homes), tuple(job.entry for job in self.jobs))

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

    # ---------------------------------------------------------------- the order of work

    def _notes(self) -> list[_Draft]:
        """From the station where data enter to one on each other device."""
        first: dict[int, int] = {}
        for station, device in enumerate(self.devices):
            first.setdefault(device, station)
        (entrance, _), *others = first.items()
        notes = [_Draft(TELL, station, device, 0, "tell", uses=["note"]) for device, station in others]
        return [_Draft(TELL, 0, entrance, 0, "tell", makes=["note"]), *notes] if notes else []

    def _of_device(self, device: int) -> list[_Draft]:
        """Forwards upwards; then what others wait for, downwards; then weight gradients, those of others first."""
        routes, layers = self.routes, list(enumerate(self.routes.layers))
        drafts: list[_Draft] = []
        updates: list[_Draft] = []

        def add(kind: Kind, layer: int, slot: int, work: Work, **more: object) -> _Draft:
            drafts.append(_Draft(kind, self._number[layer, device], device, slot, work, **more))  # type: ignore[arg-type]
            return drafts[-1]

        for layer, tasks in layers:
            if tasks.home != device:
                continue
            gradient = tasks.weight_gradient
            update = _Draft(Kind.U, self._number[layer, device], device, gradient.slot, "update")
            if gradient.processor != device:
                add(RECEIVE, layer, gradient.slot + 1, "receive", uses=[f"wgrad/{layer}"])
                update.slot += 1
                drafts.append(update)
            else:
                updates.append(update)
            forward = add(Kind.F, layer, tasks.forward.slot, "forward", uses=[f"input/{layer}"])
            if layer < routes.last:
                forward.makes.append(f"input/{layer + 1}")
            if layer == 0:
                forward.makes.append("input/0")
            if layer == routes.last and tasks.elementwise is None and tasks.kind != "whole":
                forward.makes.append(f"grad/{layer}/{device}")
            for place in routes.couriers(layer):
                kind = Kind(f"{SHIP_WEIGHTS}{place.processor}")
                add(kind, layer, place.slot - 1, "ship", makes=[f"weights/{layer}"], share=place)
        for layer, tasks in reversed(layers):
            if tasks.elementwise is not None and tasks.elementwise.processor == device:
                uses = [f"raw/{layer}/{source}" for source in routes.raw_sources(layer)]
                uses += [f"input/{layer + 1}"] if tasks.factor else []
                makes = [f"grad/{layer}/{device}"]
                add(ELEMENTWISE, layer, tasks.elementwise.slot, "elementwise", uses=uses, makes=makes)
            for share in tasks.input_gradient:
                if share.processor == device:
                    kind = Kind.B if tasks.fused else Kind.I
                    name = "grad" if routes.layers[layer - 1].elementwise is None else "raw"
                    add(
                        kind,
                        layer,
                        share.slot,
                        "input_gradient",
                        uses=self._needs_of_input_gradient(layer, device),
                        makes=[f"{name}/{layer - 1}/{device}"],
                        share=share,
                    )
        here = [(layer, tasks) for layer, tasks in reversed(layers) if tasks.weight_gradient.processor == device]
        for layer, tasks in sorted(here, key=lambda pair: pair[1].home == device):
            if tasks.fused and tasks.input_gradient:
                continue
            home = tasks.home == device
            kind = Kind.B if tasks.fused else Kind.W
            uses = self._needs_of_weight_gradient(layer, device)
            makes = [] if home else [f"wgrad/{layer}"]
            add(kind, layer, tasks.weight_gradient.slot, "weight_gradient", uses=uses, makes=makes)
        return drafts + updates

    def _needs_of_input_gradient(self, layer: int, device: int) -> list[str]:
        tasks = self.routes.layers[layer]
        uses = [f"grad/{layer}/{source}" for source in self.routes.gradient_sources(layer)]
        uses += [f"weights/{layer}"] if tasks.home != device else []
        uses += [f"input/{layer}"] if tasks.rebuilds(device) else []
        return uses + ([f"input/{layer}"] if self.routes.derivative_at(layer) else [])

    def _needs_of_weight_gradient(self, layer: int, device: int) -> list[str]:
        tasks = self.routes.layers[layer]
        shared = any(share.processor == device for share in tasks.input_gradient)
        if tasks.kind == "whole":
            return [] if tasks.input_gradient else self._gradients(layer)
        if tasks.kind == "graph" and shared:
            # Both gradients of a graph are computed at once: the second one only has to be handed on.
            return []
        uses = self._gradients(layer)
        uses += [f"input/{layer}"] if tasks.kind == "linear" or tasks.rebuilds(device) else []
        return uses + ([f"weights/{layer}"] if tasks.rebuilds(device) else [])

    def _gradients(self, layer: int) -> list[str]:
        return [f"grad/{layer}/{source}" for source in self.routes.gradient_sources(layer)]

    # ------------------------------------------------------------------------ messages

    def _connect(self, drafts: list[_Draft]) -> None:
        """Say who takes and gives what."""
        users: dict[str, list[_Draft]] = {}
        for draft in sorted(drafts, key=lambda draft: draft.slot):
            for tensor in dict.fromkeys(draft.uses):
                users.setdefault(tensor, []).append(draft)
        for draft in drafts:
            if draft.work == "ship":
                assert draft.share is not None
                receiver = [u for u in users[draft.makes[0]] if u.device == draft.share.processor]
                self._hand_over(draft, draft.makes[0], receiver)
                continue
            for tensor in draft.makes:
                found = [u for u in users.get(tensor, []) if u is not draft]
                for device in sorted({u.device for u in found}):
                    self._hand_over(draft, tensor, [u for u in found if u.device == device])

    def _hand_over(self, maker: _Draft, tensor: str, users: Sequence[_Draft]) -> None:
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


def _places(tasks: LayerTasks) -> list[Place]:
    found = [*tasks.input_gradient, tasks.weight_gradient]
    return found + ([tasks.elementwise] if tasks.elementwise is not None else [])


def _finished(draft: _Draft) -> Job:
    takes = tuple(Port(tensor, station) for tensor, station in draft.takes)
    taken = tuple(tensor for tensor, _ in draft.takes)
    if draft.work == "forward" and "input/0" in draft.makes:
        takes, taken = (Port("data", OUTSIDE), *takes), ("input/0", *taken)
    gives = tuple(Port(give.tensor, give.station) for give in draft.gives)
    per: Literal["micro", "update"] = "update" if draft.kind is Kind.U else "micro"
    entry = Entry(draft.kind, draft.station, draft.slot, takes, gives, per=per)
    return Job(entry, draft.work, tuple(draft.uses), taken, tuple(draft.gives), draft.share)
