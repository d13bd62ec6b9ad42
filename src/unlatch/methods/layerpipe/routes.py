"""Which tensors the tasks of a plan hand to each other, and how often each processor uses what it is given.

Names: `input/l` is the input of layer l (and the target, at its home); `grad/l/p` the rows of the gradient of its
output that processor p computed, multiplied by the derivative of its elementwise function if it is a linear map with
one; `raw/l/p` the same before that multiplication, where it is a task of its own; `weights/l` its weights, of the
version that the receiver needs; `wgrad/l` the gradient of its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from ...plan.retiming import by_task
from ...plan.tasks import Task

__all__ = ["LayerKind", "LayerTasks", "Place", "Routes", "rows"]

#: `linear`: a linear map, whose tasks need no graph. `whole`: all tasks at home, as one graph. `graph`: anything else.
LayerKind = Literal["whole", "linear", "graph"]


class Place(NamedTuple):
    """A processor, a slot, and for shares of D the rows, as fractions of the batch."""

    processor: int
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
        return self.forward.processor

    def rebuilds(self, processor: int) -> bool:
        """Whether a processor must run the forward again to differentiate."""
        return self.kind == "graph" and processor != self.home

    @property
    def fused(self) -> bool:
        """Whether both gradients are computed in one go."""
        return self.kind == "whole" and all(d.slot == self.weight_gradient.slot for d in self.input_gradient)


class Routes:
    """What every processor sends, to whom, and how often it uses what it has.

    **Arguments:** `kinds`, `factors`: of each layer, see `LayerTasks`.
    """

    def __init__(self, tasks: Sequence[Task], kinds: Sequence[LayerKind], factors: Sequence[bool]) -> None:
        self.layers = [_layer(tasks, number, kinds[number], factors[number]) for number in range(len(kinds))]
        self.last = len(kinds) - 1
        self._uses: Counter[tuple[str, int]] = Counter()
        for number in range(len(kinds)):
            self._uses.update((f"input/{number}", p) for p in self._input_users(number))
            self._uses.update((f"weights/{number}", p) for p in self._weight_users(number))
            for source in self.gradient_sources(number):
                users = self._gradient_users(number)
                self._uses.update((f"grad/{number}/{source}", p) for p in users)
            at = self.layers[number].elementwise
            if at is not None:
                self._uses.update((f"raw/{number}/{d.processor}", at.processor) for d in self._above(number))
        self._users: dict[str, list[int]] = {}
        for name, processor in sorted(self._uses):
            self._users.setdefault(name, []).append(processor)

    def uses(self, name: str, processor: int) -> int:
        """How often a processor uses a tensor."""
        return self._uses[name, processor]

    def users(self, name: str) -> list[int]:
        """The processors that use a tensor."""
        return self._users.get(name, [])

    @property
    def depth(self) -> int:
        """Slots until a micro-batch is through everywhere, gradients that go home included."""
        last = 0
        for tasks in self.layers:
            away = tasks.weight_gradient.processor != tasks.home
            places = (tasks.forward, tasks.weight_gradient, *tasks.input_gradient)
            last = max(last, tasks.weight_gradient.slot + away, *(place.slot for place in places))
        return last

    def gradient_sources(self, layer: int) -> list[int]:
        """The processors that make the gradient of a layer's output; none if it stays inside the last layer's graph."""
        tasks = self.layers[layer]
        if tasks.elementwise is not None:
            return [tasks.elementwise.processor]
        if layer == self.last:
            return [] if tasks.kind == "whole" else [tasks.home]
        return [share.processor for share in self._above(layer)]

    def raw_sources(self, layer: int) -> list[int]:
        """The processors that make it without its elementwise factor, where that is a task of its own."""
        return [share.processor for share in self._above(layer)]

    def needed_rows(self, layer: int, processor: int) -> Place | None:
        """The share of rows of a gradient that is all a processor needs; `None` if it needs all."""
        tasks = self.layers[layer]
        if tasks.kind != "linear" or tasks.weight_gradient.processor == processor:
            return None
        return next((share for share in tasks.input_gradient if share.processor == processor), None)

    def derivative_at(self, layer: int) -> bool:
        """Whether whoever computes the input gradient of `layer` applies the function's derivative of the one below."""
        return layer > 0 and self.layers[layer - 1].factor and self.layers[layer - 1].elementwise is None

    def couriers(self, layer: int) -> list[Place]:
        """Processors that are sent weights, each with the slot in which it needs them first."""
        tasks = self.layers[layer]
        places = (*tasks.input_gradient, *([tasks.weight_gradient] if tasks.kind == "graph" else []))
        users = self.users(f"weights/{layer}")
        return [Place(user, min(p.slot for p in places if p.processor == user)) for user in users]

    def messages(self) -> list[tuple[str, int, int]]:
        """All messages for one micro-batch: name, sender, receiver."""
        found = []
        for name, user in self._uses:
            kind, layer, *source = name.split("/")
            home = self.layers[max(0, int(layer) - 1) if kind == "input" else int(layer)].home
            found.append((name, int(source[0]) if source else home, user))
        for layer_number, tasks in enumerate(self.layers):
            found.append((f"wgrad/{layer_number}", tasks.weight_gradient.processor, tasks.home))
        return sorted(message for message in found if message[1] != message[2])

    # ---------------------------------------------------------------- who uses what

    def _above(self, layer: int) -> tuple[Place, ...]:
        return self.layers[layer + 1].input_gradient if layer < self.last else ()

    def _input_users(self, layer: int) -> Iterator[int]:
        tasks = self.layers[layer]
        yield tasks.home
        if tasks.kind == "linear":
            yield tasks.weight_gradient.processor
        yield from self._rebuilders(layer)
        if self.derivative_at(layer):
            yield from (share.processor for share in tasks.input_gradient)
        below = self.layers[layer - 1] if layer else None
        if below is not None and below.factor and below.elementwise is not None:
            yield below.elementwise.processor

    def _rebuilders(self, layer: int) -> set[int]:
        tasks = self.layers[layer]
        places = (*tasks.input_gradient, tasks.weight_gradient)
        return {place.processor for place in places if tasks.rebuilds(place.processor)}

    def _weight_users(self, layer: int) -> Iterator[int]:
        tasks = self.layers[layer]
        if tasks.kind == "graph":
            yield from self._rebuilders(layer)
        elif tasks.kind == "linear":
            yield from (share.processor for share in tasks.input_gradient if share.processor != tasks.home)

    def _gradient_users(self, layer: int) -> Iterator[int]:
        tasks = self.layers[layer]
        yield from (share.processor for share in tasks.input_gradient)
        at = tasks.weight_gradient.processor
        together = tasks.kind != "linear" and any(share.processor == at for share in tasks.input_gradient)
        if not together:
            yield at


def _layer(tasks: Sequence[Task], number: int, kind: LayerKind, factor: bool) -> LayerTasks:
    shares = by_task(task for task in tasks if task.layer == number)
    places: list[Place] = []
    done = Fraction(0)
    for share in sorted(shares.get(("D", number), []), key=lambda share: share.processor):
        places.append(Place(share.processor, share.slot, done, done + share.fraction))
        done += share.fraction
    (forward,), (weight,) = shares["F", number], shares["G", number]
    elementwise = next((Place(t.processor, t.slot) for t in shares.get(("H", number), [])), None)
    return LayerTasks(
        kind,
        factor,
        Place(forward.processor, forward.slot),
        Place(weight.processor, weight.slot),
        tuple(places),
        elementwise,
    )
