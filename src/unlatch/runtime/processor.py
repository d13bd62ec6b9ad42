"""One processor of a LayerPipe plan: its tasks in order, what it is sent, and what it sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..nn.linear_map import LinearMap
from ..nn.tree import Tree, map_tensors
from ..plan.task_routes import Place, rows
from ..schedule import Kind
from .exchange import Exchange
from .layer_away import GraphAway, LinearAway
from .layer_home import Home, LinearHome
from .micro import Micro
from .stage import Gradients, Stage

__all__ = ["Processor", "Work"]

ALL = Place(0, 0)


class Work(NamedTuple):
    """Something to do with micro-batch `t` in slot `t + slot`."""

    slot: int
    do: Callable[[Micro], None]


class Processor:
    """Does the tasks of a plan that fall to one processor.

    What a slot needs was sent in an earlier slot, so only the order of slots matters, never the time.

    **Arguments:**

    - `exchange`: gets and hands on tensors; knows which processor this is, and the plan.
    - `homes`: the layers that live here.
    - `aways`: workers for tasks of layers that live elsewhere.
    - `linears`: the linear map that a layer is, for each layer.
    - `face`: the stage under whose name tasks of other layers are recorded.
    - `timed`: called with stage, kind, micro-batch, function and arguments; records, and names the place of a failure.
    - `stale`: called with stage, micro-batch and updates between a forward and the arrival of its gradient.
    - `losses`: by micro-batch; filled from what arrives.
    """

    def __init__(
        self,
        exchange: Exchange,
        homes: Mapping[int, Home],
        aways: Mapping[int, LinearAway | GraphAway],
        linears: Sequence[LinearMap | None],
        face: Stage,
        timed: Callable[..., Any],
        stale: Callable[[int, Micro, int], None],
        losses: dict[int, float],
    ) -> None:
        self.exchange = exchange
        self.number, self.routes = exchange.number, exchange.routes
        self.homes, self.aways, self.linears = homes, aways, linears
        self.face = face
        self._timed, self._stale, self._losses = timed, stale, losses
        self._due: list[tuple[Home, Micro]] = []
        self._shapes: dict[int, tuple[int, ...]] = {}
        self.works = list(self._plan())

    def slot(self, number: int, micros: Mapping[int, Micro]) -> None:
        """Do what is due in a slot; `micros` are those that have entered, by their order."""
        for slot, do in self.works:
            micro = micros.get(number - slot)
            if micro is not None:
                do(micro)
        for home, micro in self._due:
            self._update(home, micro)
        self._due.clear()
        self.face.peak_bytes = max(self.face.peak_bytes, self.face.kept_bytes + self.exchange.desk.peak_bytes)

    def feed(self, micro: Micro, x: Tree, y: Tree) -> None:
        """Give the first processor a micro-batch. What travels is copied: the caller may use its memory again."""
        target = map_tensors(Tensor.clone, y)

        def given(user: int) -> Tree:
            return (x, target) if user == self.number else (map_tensors(Tensor.clone, x), None)

        self.exchange.deliver("input/0", micro, given)

    # ----------------------------------------------------------------- the order of work

    def _plan(self) -> Iterator[Work]:
        """Forwards upwards; then what others wait for, downwards; then weight gradients, those of others first."""
        layers = list(enumerate(self.routes.layers))
        for layer, tasks in layers:
            if tasks.home != self.number:
                continue
            if tasks.weight_gradient.processor != self.number:
                yield Work(tasks.weight_gradient.slot + 1, partial(self._receive, layer))
            yield Work(tasks.forward.slot, partial(self._forward, layer))
            for courier in self.routes.couriers(layer):
                yield Work(courier.slot - 1, partial(self._send_weights, layer, courier.processor))
        for layer, tasks in reversed(layers):
            if tasks.elementwise is not None and tasks.elementwise.processor == self.number:
                yield Work(tasks.elementwise.slot, partial(self._elementwise, layer))
            for share in tasks.input_gradient:
                if share.processor == self.number:
                    yield Work(share.slot, partial(self._input_gradient, layer, share))
        gradients = [(layer, t) for layer, t in reversed(layers) if t.weight_gradient.processor == self.number]
        for layer, tasks in sorted(gradients, key=lambda pair: pair[1].home == self.number):
            if not (tasks.fused and tasks.input_gradient):
                yield Work(tasks.weight_gradient.slot, partial(self._weight_gradient, layer))

    # ---------------------------------------------------------------------------- tasks

    def _forward(self, layer: int, micro: Micro) -> None:
        home = self.homes[layer]
        inputs, target = self.exchange.fetch(f"input/{layer}", micro)
        outputs, gradient = self._timed(home, Kind.F, micro, self._run_forward, layer, micro, inputs, target)
        if layer < self.routes.last:
            above = self.routes.layers[layer + 1].home
            self.exchange.deliver(
                f"input/{layer + 1}", micro, lambda user: (outputs, target if user == above else None), home.version
            )
            return
        assert home.loss is not None
        self._losses[micro.id] = home.loss
        if gradient is not None:
            self.exchange.deliver_gradient("grad", layer, micro, gradient, ALL)

    def _run_forward(self, layer: int, micro: Micro, inputs: Tree, target: Tree) -> tuple[Tree, Gradients | None]:
        home = self.homes[layer]
        outputs = home.forward(micro, inputs, target if home.last else None)
        if layer < self.routes.last or home.last:
            return outputs, None
        gradient = home.loss_gradient(micro, outputs, target)
        return outputs, self._derivative(layer, gradient, outputs)

    def _derivative(self, layer: int, gradient: Gradients, outputs: Tree) -> Gradients:
        """Multiply with the derivative of a layer's elementwise function, given its output."""
        linear = self.linears[layer]
        if linear is None or not self.routes.layers[layer].factor:
            return gradient
        with torch.no_grad():
            (found,) = gradient
            return [linear.derivative(torch.zeros_like(outputs) if found is None else found, outputs)]

    def _input_gradient(self, layer: int, share: Place, micro: Micro) -> None:
        tasks, home = self.routes.layers[layer], self.homes.get(layer)
        gradient = self.exchange.gradient(layer, micro)
        weights, count = self._weights(layer, micro)
        inputs = self.exchange.fetch(f"input/{layer}", micro)[0] if tasks.rebuilds(self.number) else None
        outputs_below = self.exchange.fetch(f"input/{layer}", micro)[0] if self.routes.derivative_at(layer) else None

        def work() -> Gradients:
            found = self._differentiate(layer, share, micro, gradient, weights, inputs)
            if outputs_below is None:
                return found
            begin, end = (0, None) if share.whole else rows(share, count)
            return self._derivative(layer - 1, found, outputs_below[begin:end])

        if home is not None and tasks.fused:
            self._note_arrival(home, micro)
        found = self._timed(home or self.face, Kind.B if tasks.fused else Kind.I, micro, work)
        name = "grad" if self.routes.layers[layer - 1].elementwise is None else "raw"
        self.exchange.deliver_gradient(name, layer - 1, micro, found, share, count)

    def _weights(self, layer: int, micro: Micro) -> tuple[list[Tensor], int]:
        """Weights that were sent here for a layer of another home, and the rows of its input if it is a linear map."""
        home = self.homes.get(layer)
        if home is not None:
            return [], home.shapes[micro.id][0] if isinstance(home, LinearHome) else 0
        weights, shape = self.exchange.fetch(f"weights/{layer}", micro)
        self._shapes[layer] = tuple(shape)
        return weights, shape[0] if shape else 0

    def _differentiate(
        self, layer: int, share: Place, micro: Micro, gradient: Gradients | None, weights: list[Tensor], inputs: Tree
    ) -> Gradients:
        """The input gradient of a layer, here or at home; the other gradient is held if it comes along."""
        home = self.homes.get(layer)
        if home is not None:
            if isinstance(home, LinearHome):
                gradient = [self._own_rows(layer, share, gradient, home.shapes[micro.id][0])]
            return home.input_gradient(micro, gradient)
        away = self.aways[layer]
        if isinstance(away, LinearAway):
            shape = self._shapes[layer]
            return away.input_gradient(self._own_rows(layer, share, gradient, shape[0]), weights, shape)
        assert gradient is not None
        both = self.routes.layers[layer].weight_gradient.processor == self.number
        found = away.differentiate(micro, inputs, weights, gradient, for_inputs=True, for_weights=both)
        if both:
            self.exchange.desk.put(f"held/{layer}", micro.id, found.weights, 1)
        return found.inputs

    def _own_rows(self, layer: int, share: Place, gradient: Gradients | None, count: int) -> Tensor:
        """The rows of a share, of a gradient of which this processor has all rows or just those."""
        assert gradient is not None
        (delta,) = gradient
        assert delta is not None
        if self.routes.needed_rows(layer, self.number) is not None:
            return delta
        begin, end = rows(share, count)
        return delta[begin:end]

    def _elementwise(self, layer: int, micro: Micro) -> None:
        raw = self.exchange.raw_gradient(layer, micro)
        if self.routes.layers[layer].factor:
            outputs = self.exchange.fetch(f"input/{layer + 1}", micro)[0]
            raw = self._timed(self.face, Kind.I, micro, self._derivative, layer, raw, outputs)
        self.exchange.deliver_gradient("grad", layer, micro, raw, ALL)

    def _weight_gradient(self, layer: int, micro: Micro) -> None:
        tasks, home = self.routes.layers[layer], self.homes.get(layer)
        if self.exchange.desk.holds(f"held/{layer}", micro.id):
            self.exchange.send(f"wgrad/{layer}", tasks.home, micro, self.exchange.desk.use(f"held/{layer}", micro.id))
            return
        started = tasks.kind == "whole" and bool(tasks.input_gradient)
        gradient = None if started else self.exchange.gradient(layer, micro)
        needs_inputs = tasks.kind == "linear" or tasks.rebuilds(self.number)
        inputs = self.exchange.fetch(f"input/{layer}", micro)[0] if needs_inputs else None
        if home is None:
            work = partial(self._weight_gradient_away, layer, micro, gradient, inputs, self._rebuilding(layer, micro))
            self.exchange.send(f"wgrad/{layer}", tasks.home, micro, self._timed(self.face, Kind.W, micro, work))
            return
        self._note_arrival(home, micro)
        kind = Kind.B if tasks.fused else Kind.W
        found = self._timed(home, kind, micro, home.weight_gradient, micro, gradient, inputs)
        if found is not None:
            home.receive(micro, found)

    def _rebuilding(self, layer: int, micro: Micro) -> list[Tensor]:
        return self._weights(layer, micro)[0] if self.routes.layers[layer].rebuilds(self.number) else []

    def _weight_gradient_away(
        self, layer: int, micro: Micro, gradient: Gradients | None, inputs: Tree, weights: list[Tensor]
    ) -> Gradients:
        away = self.aways[layer]
        assert gradient is not None
        if isinstance(away, LinearAway):
            (delta,) = gradient
            assert delta is not None
            return away.weight_gradient(delta, inputs)
        return away.differentiate(micro, inputs, weights, gradient, for_inputs=False, for_weights=True).weights

    # --------------------------------------------------------------- weights and updates

    def _send_weights(self, layer: int, user: int, micro: Micro) -> None:
        home = self.homes[layer]
        shape = home.shapes[micro.id] if isinstance(home, LinearHome) else ()
        self.exchange.send(f"weights/{layer}", user, micro, (home.send_weights(micro), list(shape)), home.version)

    def _receive(self, layer: int, micro: Micro) -> None:
        home = self.homes[layer]
        found = self.exchange.take(f"wgrad/{layer}", micro)
        self._stale(home.index, micro, home.behind(micro))
        home.receive(micro, found)
        self._update(home, micro)

    def _note_arrival(self, home: Home, micro: Micro) -> None:
        """A gradient is computed at home: it counts now, and changes weights when the slot is over."""
        self._stale(home.index, micro, home.behind(micro))
        self._due.append((home, micro))

    def _update(self, home: Home, micro: Micro) -> None:
        if micro.ends:
            self._timed(home, Kind.U, micro.update, home.update)
