"""Which tensors the tasks of a plan hand to each other: the one reading of planner, simulator and executor.

Names: `input/l` is the input of layer l (and the target, at its home); `grad/l/p` the rows of the gradient of its
output that device p computed, multiplied by the derivative of its elementwise function if it is a linear map with
one; `raw/l/p` the same before that multiplication, where it is a task of its own; `weights/l` its weights, of the
version that the receiver needs; `wgrad/l` the gradient of its weights; `note` nothing but the news that a micro-batch
has entered.

A layer that is not a linear map is run forward again wherever else one of its gradients is computed; there, both
gradients are computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

from .layer_costs import LayerCost, Number, exact
from .tasks import Task, TaskKind, by_task

__all__ = [
    "Dataflow",
    "LayerKind",
    "LayerTasks",
    "Message",
    "Place",
    "Sizes",
    "Step",
    "Work",
    "cut_bytes",
    "direct_bytes",
    "layer_kinds",
    "rows",
]

#: `linear`: a linear map, whose tasks need no graph. `whole`: all tasks at home, as one graph. `graph`: anything else.
LayerKind = Literal["whole", "linear", "graph"]
Work = Literal["tell", "forward", "ship", "elementwise", "input_gradient", "weight_gradient", "receive", "update"]


class Place(NamedTuple):
    """A device, a slot, and for shares of D the rows, as fractions of the batch."""

    device: int
    slot: int
    begin: Fraction = Fraction(0)
    end: Fraction = Fraction(1)

    @property
    def whole(self) -> bool:
        """Whether it is all rows."""
        return self.begin == 0 and self.end == 1


def rows(place: Place, count: int) -> tuple[int, int]:
    """The rows of a batch of `count` that fall to a share.

    >>> third = Fraction(1, 3)
    >>> rows(Place(0, 0, Fraction(0), third), 8), rows(Place(1, 0, third, Fraction(1)), 8)
    ((0, 3), (3, 8))
    """
    return round(place.begin * count), round(place.end * count)


ALL = Place(0, 0)
NOTE = "note"


@dataclass(frozen=True)
class LayerTasks:
    """Where the tasks of one layer are done."""

    kind: LayerKind
    #: Whether whoever computes the gradient of its output must multiply with the derivative of its function.
    factor: bool
    forward: Place
    weight_gradient: Place
    input_gradient: tuple[Place, ...]
    elementwise: Place | None

    @property
    def home(self) -> int:
        return self.forward.device

    def rebuilds(self, device: int) -> bool:
        """Whether a device must run the forward again to differentiate."""
        return self.kind == "graph" and device != self.home

    @property
    def fused(self) -> bool:
        """Whether both gradients are computed in one go."""
        return self.kind == "whole" and all(d.slot == self.weight_gradient.slot for d in self.input_gradient)


class Step(NamedTuple):
    """What one device does in one go, with the tensors that it uses, in order, and those that it makes.

    `computes` are the tasks that take its time: F stands for a forward, be it the first or one run again. `receiver` is
    the device that weights are shipped to.
    """

    work: Work
    layer: int
    place: Place
    uses: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    computes: tuple[TaskKind, ...] = ()
    receiver: int | None = None


class Sizes(NamedTuple):
    """Bytes of the tensors of one micro-batch.

    **Arguments:**

    - `outputs`, `weights`: of each layer; the gradients of both are as large.
    - `data`, `target`: what enters.
    - `samples`: how many rows there are, where shares of them are to be counted in whole rows.
    """

    outputs: Sequence[Number]
    weights: Sequence[Number]
    data: Number = 0
    target: Number = 0
    samples: int | None = None

    @classmethod
    def of(cls, layers: Sequence[LayerCost]) -> Sizes:
        """Those that costs tell."""
        return cls([exact(c.activation_bytes) for c in layers], [exact(c.weight_bytes) for c in layers])


class Message(NamedTuple):
    """A tensor on its way between two devices."""

    tensor: str
    sender: int
    receiver: int
    bytes: Number


def layer_kinds(tasks: Sequence[Task], linear: Sequence[bool]) -> list[LayerKind]:
    """How each layer is treated, given which ones are linear maps."""
    places: list[set[int]] = [set() for _ in linear]
    for task in tasks:
        places[task.layer].add(task.device)
    return [
        "linear" if is_map else "whole" if len(found) == 1 else "graph"
        for is_map, found in zip(linear, places, strict=True)
    ]


class Dataflow:
    """What every device needs and makes for one micro-batch, and what it is sent.

    **Arguments:** `kinds`, `factors`: of each layer, see `LayerTasks`. By default all are linear maps with an
    elementwise function.

    >>> one = Fraction(1)
    >>> placed = [Task(*task, one) for task in (("F", 0, 0), ("G", 0, 0), ("D", 1, 1), ("F", 1, 1), ("G", 1, 1))]
    >>> [message[:3] for message in Dataflow(placed, 2).messages(Sizes([8, 8], [4, 4]))]
    [('grad/0/1', 1, 0), ('input/1', 0, 1), ('note', 0, 1)]
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        layers: int,
        kinds: Sequence[LayerKind] | None = None,
        factors: Sequence[bool] | None = None,
    ) -> None:
        kinds = kinds or ["linear"] * layers
        factors = factors or [kind == "linear" for kind in kinds]
        shares = by_task(tasks)
        self.layers = [_layer(shares, number, kinds[number], factors[number]) for number in range(layers)]
        self.last = layers - 1

    @cached_property
    def steps(self) -> list[Step]:
        """Everything but updates, in an order in which none comes before what it needs."""
        found = [*self._tells(), *(self._forward(layer) for layer in range(len(self.layers)))]
        for layer in reversed(range(len(self.layers))):
            tasks = self.layers[layer]
            found += [] if tasks.elementwise is None else [self._elementwise(layer, tasks.elementwise)]
            found += self._ships(layer)
            found += [self._input_gradient(layer, share) for share in tasks.input_gradient]
            if not (tasks.fused and tasks.input_gradient):
                found.append(self._weight_gradient(layer))
            if tasks.weight_gradient.device != tasks.home:
                at = Place(tasks.home, tasks.weight_gradient.slot + 1)
                found.append(Step("receive", layer, at, (f"wgrad/{layer}",)))
        return found

    @cached_property
    def _sends(self) -> list[tuple[str, int, int]]:
        made: dict[str, int] = {}
        used: dict[tuple[str, int], None] = {}
        for step in self.steps:
            made.update(dict.fromkeys(step.makes, step.place.device))
            used.update(dict.fromkeys((tensor, step.place.device) for tensor in step.uses))
        return sorted((tensor, made[tensor], user) for tensor, user in used if made[tensor] != user)

    def messages(self, sizes: Sizes) -> list[Message]:
        """All messages of one micro-batch: a tensor goes once to every device that needs it."""
        return [Message(*send, self._bytes(*send, sizes)) for send in self._sends]

    def time(self, step: Step, costs: Sequence[LayerCost]) -> Fraction:
        """How long a step takes."""
        cost, total = costs[step.layer], Fraction(0)
        for kind in step.computes:
            if kind == "H":
                total += exact(costs[step.layer + 1].hadamard)
            elif kind == "D":
                below = self.layers[step.layer - 1].elementwise
                product = exact(cost.D) - (exact(cost.hadamard) if below is not None else 0)
                total += product * (step.place.end - step.place.begin)
            else:
                total += exact(getattr(cost, kind))
        return total

    def repeated_forwards(self) -> list[tuple[int, int]]:
        """Layers that are run forward again, each with the device that does it."""
        return [(s.layer, s.place.device) for s in self.steps if s.work != "forward" and "F" in s.computes]

    def made_bytes(self, tensor: str, sizes: Sizes) -> Number:
        """The size of a tensor as it is made."""
        if tensor == NOTE:
            return 0
        kind, number, *_ = tensor.split("/")
        layer = int(number)
        if kind == "input":
            return sizes.outputs[layer - 1] + sizes.target if layer else sizes.data
        if kind in ("weights", "wgrad"):
            return sizes.weights[layer]
        return sizes.outputs[layer] * _overlap(self._made_rows(tensor), ALL, sizes.samples)

    def _bytes(self, tensor: str, sender: int, receiver: int, sizes: Sizes) -> Number:
        """The size of what a device is sent of a tensor: the target goes home, and rows to whom they concern."""
        if tensor == NOTE:
            return 0
        kind, number, *_ = tensor.split("/")
        layer = int(number)
        if kind == "input" and layer and receiver != self.layers[layer].home:
            return sizes.outputs[layer - 1]
        needed = self.needed_rows(layer, receiver) if kind == "grad" else None
        if needed is None:
            return self.made_bytes(tensor, sizes)
        return sizes.outputs[layer] * _overlap(self._made_rows(tensor), needed, sizes.samples)

    def _made_rows(self, tensor: str) -> Place:
        """The share of rows that a gradient consists of."""
        kind, number, source = tensor.split("/")
        if kind == "grad" and self.layers[int(number)].elementwise is not None:
            return ALL
        return next((share for share in self._above(int(number)) if share.device == int(source)), ALL)

    # ------------------------------------------------------------------ single tensors

    def gradient_sources(self, layer: int) -> list[int]:
        """The devices that make the gradient of a layer's output; none if it stays inside the last layer's graph."""
        tasks = self.layers[layer]
        if tasks.elementwise is not None:
            return [tasks.elementwise.device]
        if layer == self.last:
            return [] if tasks.kind == "whole" else [tasks.home]
        return [share.device for share in self._above(layer)]

    def needed_rows(self, layer: int, device: int) -> Place | None:
        """The share of rows of a gradient that is all a device needs; `None` if it needs all."""
        tasks = self.layers[layer]
        if tasks.kind != "linear" or tasks.weight_gradient.device == device:
            return None
        return next((share for share in tasks.input_gradient if share.device == device), None)

    def derivative_at(self, layer: int) -> bool:
        """Whether whoever computes the input gradient of `layer` applies the function's derivative of the one below."""
        return layer > 0 and self.layers[layer - 1].factor and self.layers[layer - 1].elementwise is None

    def weight_receivers(self, layer: int) -> list[Place]:
        """Devices that are sent weights, each with the slot in which it needs them first."""
        return [Place(step.place.device, step.place.slot) for step in self._users_of_weights(layer)]

    # --------------------------------------------------------------------- single steps

    def _tells(self) -> Iterator[Step]:
        """From where data enter to the first place of work on every other device."""
        first: dict[int, int] = {}
        for layer, tasks in enumerate(self.layers):
            first.setdefault(tasks.home, layer)
        for layer, tasks in enumerate(self.layers):
            places = [*tasks.input_gradient, tasks.weight_gradient, *([tasks.elementwise] if tasks.elementwise else [])]
            for place in sorted(places):
                first.setdefault(place.device, layer)
        entrance, *others = first
        if others:
            yield Step("tell", first[entrance], Place(entrance, 0), makes=(NOTE,))
            yield from (Step("tell", first[other], Place(other, 0), (NOTE,)) for other in others)

    def _forward(self, layer: int) -> Step:
        tasks = self.layers[layer]
        makes = ["input/0"] if layer == 0 else []
        makes += [f"input/{layer + 1}"] if layer < self.last else []
        if layer == self.last and tasks.elementwise is None and tasks.kind != "whole":
            makes.append(f"grad/{layer}/{tasks.home}")
        return Step("forward", layer, tasks.forward, (f"input/{layer}",), tuple(makes), ("F",))

    def _elementwise(self, layer: int, place: Place) -> Step:
        uses = [f"raw/{layer}/{share.device}" for share in self._above(layer)]
        uses += [f"input/{layer + 1}"] if self.layers[layer].factor else []
        return Step("elementwise", layer, place, tuple(uses), (f"grad/{layer}/{place.device}",), ("H",))

    def _ships(self, layer: int) -> Iterator[Step]:
        for step in self._users_of_weights(layer):
            at = Place(self.layers[layer].home, step.place.slot - 1)
            yield Step("ship", layer, at, makes=(f"weights/{layer}",), receiver=step.place.device)

    def _input_gradient(self, layer: int, share: Place) -> Step:
        tasks, at = self.layers[layer], share.device
        uses = self._gradients(layer)
        uses += [f"weights/{layer}"] if at != tasks.home else []
        uses += [f"input/{layer}"] if tasks.rebuilds(at) else []
        uses += [f"input/{layer}"] if self.derivative_at(layer) else []
        name = "grad" if self.layers[layer - 1].elementwise is None else "raw"
        computes: list[TaskKind] = ["F"] if tasks.rebuilds(at) else []
        computes += ["D", "G"] if tasks.fused or self._both(layer, at) else ["D"]
        return Step("input_gradient", layer, share, tuple(uses), (f"{name}/{layer - 1}/{at}",), tuple(computes))

    def _weight_gradient(self, layer: int) -> Step:
        tasks, place = self.layers[layer], self.layers[layer].weight_gradient
        makes = () if place.device == tasks.home else (f"wgrad/{layer}",)
        both = self._both(layer, place.device)
        if both or (tasks.kind == "whole" and tasks.input_gradient):
            # Both gradients of a graph are computed at once: the second one only has to be handed on.
            return Step("weight_gradient", layer, place, (), makes, () if both else ("G",))
        again = tasks.rebuilds(place.device)
        uses = self._gradients(layer)
        uses += [f"input/{layer}"] if tasks.kind == "linear" or again else []
        uses += [f"weights/{layer}"] if again else []
        return Step("weight_gradient", layer, place, tuple(uses), makes, ("F", "G") if again else ("G",))

    def _both(self, layer: int, device: int) -> bool:
        """Whether a graph away from home gives both gradients there."""
        tasks = self.layers[layer]
        places = {share.device for share in tasks.input_gradient}
        return tasks.kind == "graph" and tasks.weight_gradient.device == device and device in places

    def _users_of_weights(self, layer: int) -> list[Step]:
        """The first step of each device that needs weights sent."""
        tasks = self.layers[layer]
        steps = [self._input_gradient(layer, share) for share in tasks.input_gradient]
        steps.append(self._weight_gradient(layer))
        found: dict[int, Step] = {}
        for step in sorted(steps, key=lambda step: step.place.slot):
            if f"weights/{layer}" in step.uses:
                found.setdefault(step.place.device, step)
        return [found[device] for device in sorted(found)]

    def _above(self, layer: int) -> tuple[Place, ...]:
        return self.layers[layer + 1].input_gradient if layer < self.last else ()

    def _gradients(self, layer: int) -> list[str]:
        return [f"grad/{layer}/{source}" for source in self.gradient_sources(layer)]


def _overlap(made: Place, needed: Place, samples: int | None) -> Fraction:
    """The share of all rows that two places have in common."""
    if samples is None:
        return max(Fraction(0), min(made.end, needed.end) - max(made.begin, needed.begin))
    (begin, end), (first, last) = rows(made, samples), rows(needed, samples)
    return Fraction(max(0, min(end, last) - max(begin, first)), samples)


def cut_bytes(flow: Dataflow, sizes: Sizes, devices: int) -> list[Fraction]:
    """Bytes over each border of a row of devices, where a tensor passes all borders on its way, once each.

    >>> one = Fraction(1)
    >>> placed = [Task(*task, one) for task in (("F", 0, 0), ("G", 0, 0), ("D", 1, 1), ("F", 1, 1), ("G", 1, 1))]
    >>> cut_bytes(Dataflow(placed, 2), Sizes([10, 20], [7, 9]), 2)
    [Fraction(20, 1)]
    """
    crossing = [Fraction(0)] * (devices - 1)
    sent: dict[tuple[str, int], list[Message]] = {}
    for message in flow.messages(sizes):
        sent.setdefault((message.tensor, message.sender), []).append(message)
    for (tensor, place), messages in sent.items():
        whole = exact(flow.made_bytes(tensor, sizes))
        reached = [place, *(message.receiver for message in messages)]
        for border in range(min(reached), max(reached)):
            beyond = [m.bytes for m in messages if min(place, m.receiver) <= border < max(place, m.receiver)]
            crossing[border] += min(whole, sum(map(exact, beyond), Fraction(0)))
    return crossing


def direct_bytes(flow: Dataflow, sizes: Sizes) -> Fraction:
    """Bytes in all if every device sends to every other directly, once for each that needs a tensor."""
    return sum((exact(message.bytes) for message in flow.messages(sizes)), Fraction(0))


def _layer(
    shares: Mapping[tuple[TaskKind, int], Sequence[Task]], number: int, kind: LayerKind, factor: bool
) -> LayerTasks:
    places: list[Place] = []
    done = Fraction(0)
    for share in sorted(shares.get(("D", number), []), key=lambda share: share.device):
        places.append(Place(share.device, share.slot, done, done + share.fraction))
        done += share.fraction
    (forward,), (weight,) = shares["F", number], shares["G", number]
    elementwise = next((Place(t.device, t.slot) for t in shares.get(("H", number), [])), None)
    return LayerTasks(
        kind,
        factor,
        Place(forward.device, forward.slot),
        Place(weight.device, weight.slot),
        tuple(places),
        elementwise,
    )
