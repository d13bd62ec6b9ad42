"""A station of placed tasks: a layer at home, or a place away from home where some of its gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import StageFailed
from ...nn.linear_map import LinearMap
from ...nn.tree import Tree, leaves, map_tensors, tree_bytes
from ...plan.dataflow import Place, rows
from ...runtime.stage import Gradients
from ...runtime.station import Operation, Roundable, Station
from ...schedule import Kind
from ...transport.mail import Micro
from .entries import Job, TaskLayout
from .layers import GraphAway, Home, LinearAway, LinearHome

__all__ = ["TaskStation"]

ALL = Place(0, 0)


class _Made(NamedTuple):
    """A gradient of a layer's output: which rows of how many."""

    gradient: Gradients
    share: Place = ALL
    samples: int = 0


class _Held:
    """A tensor that waits for its uses, with torch's counters of in-place changes."""

    __slots__ = ("nbytes", "stamps", "uses", "value")

    def __init__(self, value: Tree, uses: int, *, passing: bool = False) -> None:
        self.value, self.uses = value, uses
        self.nbytes = 0 if passing else tree_bytes(value)
        self.stamps = None if passing else _stamps(value)


class TaskStation(Station):
    """Does the jobs of one layer at one place.

    **Arguments:**

    - `layout`: what there is to do, and who needs what.
    - `home`: the layer, where its weights live here.
    - `away`: computes its gradients elsewhere.
    - `linears`: the linear map that a layer is, for each layer.
    """

    def __init__(
        self,
        index: int,
        layout: TaskLayout,
        home: Home | None,
        away: LinearAway | GraphAway | None,
        linears: Sequence[LinearMap | None],
    ) -> None:
        super().__init__(index, home)
        self.layer, self.device = layout.stations[index]
        self.home, self.away, self.linears = home, away, linears
        self.flow = layout.flow
        self.tasks = layout.flow.layers[self.layer]
        self._jobs = layout.jobs_of(index)
        self._uses = {name: layout.uses(name, index) for job in self._jobs for name in job.uses}
        self._works: dict[str, Callable[[Job, Micro], dict[str, Any]]] = {
            "tell": self._tell,
            "forward": self._forward,
            "ship": self._ship,
            "elementwise": self._elementwise,
            "input_gradient": self._input_gradient,
            "weight_gradient": self._weight_gradient,
            "receive": self._receive,
            "update": self._apply,
        }
        self._held: dict[tuple[str, int], _Held] = {}
        self._held_bytes = 0
        self._weight_gradients: dict[int, Gradients] = {}

    @property
    def title(self) -> str:
        # Numbers of stations away from home are those of no layer.
        return super().title if self.home is not None else f"layer {self.layer} on device {self.device}"

    def operations(self) -> Mapping[Kind, Operation]:
        return {job.entry.kind: partial(self._perform, job) for job in self._jobs}

    def roundable(self, name: str) -> Roundable:
        # Weights on their way out, and their gradients on the way home, stay exact.
        if name.startswith("input/"):
            return "first"
        return "all" if name.startswith(("grad/", "raw/")) else "nothing"

    @property
    def kept_bytes(self) -> int:
        return super().kept_bytes + self._held_bytes

    def _perform(self, job: Job, micro: Micro, *arrived: Any) -> Sequence[Any]:
        for name, value in zip(job.taken, arrived, strict=True):
            # What this job alone uses is not held for anybody.
            if self._uses.get(name) == 1:
                self._held[name, micro.id] = _Held(value, 1, passing=True)
            else:
                self._hold(name, micro, value)
        handed = dict(zip(job.taken, arrived, strict=True))
        made = self._works[job.work](job, micro)
        for name, value in made.items():
            # What was taken is held already; of the first layer's input the caller's copy is made for others.
            if name in self._uses and name not in handed:
                self._hold(name, micro, self._payload(name, value, self.index, self.device))
        return [
            self._payload(name, made[name], station, device) if fresh else handed[name]
            for name, station, device, fresh in job.gives
        ]

    # -------------------------------------------------------------------- what is held

    def _hold(self, name: str, micro: Micro, value: Any) -> None:
        uses = self._uses.get(name, 0)
        if uses:
            item = self._held[name, micro.id] = _Held(value, uses)
            self._held_bytes += item.nbytes
            if self.stage is not None:
                self.stage.peak_bytes = max(self.stage.peak_bytes, self.kept_bytes)

    def _use(self, name: str, micro: Micro) -> Any:
        """A tensor that is here; gone after its last use."""
        item = self._held[name, micro.id]
        if item.stamps is not None and item.stamps != _stamps(item.value):
            raise StageFailed(
                f"{name} of micro-batch {micro.id} was changed in place while it was under way: pass a fresh tensor, "
                "or a copy, to every step()"
            )
        item.uses -= 1
        if not item.uses:
            del self._held[name, micro.id]
            self._held_bytes -= item.nbytes
        return item.value

    def _gradient(self, kind: str, job: Job, micro: Micro) -> Gradients | None:
        """The gradient of the layer's output, all parts of it joined; `None` if the layer has it in its own graph."""
        parts: list[Gradients] = [self._use(name, micro) for name in job.uses if name.startswith(f"{kind}/")]
        if len(parts) < 2:
            return parts[0] if parts else None
        return [torch.cat([part[0] for part in parts if part[0] is not None])]

    def _payload(self, name: str, value: Any, station: int, device: int) -> Any:
        """What a station is sent of a tensor."""
        if isinstance(value, _Made):
            return self._rows_for(name, value, device)
        if name.startswith("input/"):
            value, target = value
            _, layer = _parsed(name)
            if layer == 0 and station != self.index:
                # The caller may use its memory for the next batch.
                return map_tensors(Tensor.clone, value), None
            return value, target if station == layer else None
        return value

    def _rows_for(self, name: str, made: _Made, device: int) -> Gradients:
        """Rows of the gradient of a layer's output, for those who need only some of them."""
        kind, layer = _parsed(name)
        needed = self.flow.needed_rows(layer, device) if kind == "grad" else None
        if needed is None:
            return made.gradient
        (found,) = made.gradient
        assert found is not None
        total = found.shape[0] if made.share.whole else made.samples
        begin, end = rows(made.share, total)
        first, last = rows(needed, total)
        # A copy starts where the memory of a received tensor would: kernels may depend on alignment.
        return [found[max(begin, first) - begin : max(0, min(end, last) - begin)].clone()]

    def _kept_state(self) -> dict[str, Any]:
        held = [[*key, item.value, item.uses] for key, item in self._held.items()]
        home = self.home.uses_state() if self.home is not None else None
        return {"held": held, "weight_gradients": self._weight_gradients, "home": home}

    def _load_kept(self, state: Mapping[str, Any]) -> None:
        self._held = {(name, micro): _Held(value, uses) for name, micro, value, uses in state["held"]}
        self._held_bytes = sum(item.nbytes for item in self._held.values())
        self._weight_gradients = dict(state["weight_gradients"])
        if self.home is not None:
            self.home.load_uses(state["home"])

    # --------------------------------------------------------------------------- tasks

    def _tell(self, job: Job, micro: Micro) -> dict[str, Any]:
        for name in job.uses:
            self._use(name, micro)
        return {"note": None}

    def _forward(self, job: Job, micro: Micro) -> dict[str, Any]:
        home, layer = self._at_home(), self.layer
        inputs, target = self._use(f"input/{layer}", micro)
        made: dict[str, Any] = {"input/0": (inputs, map_tensors(Tensor.clone, target))} if layer == 0 else {}
        outputs = home.forward(micro, inputs, target if home.last else None)
        if layer < self.flow.last:
            made[f"input/{layer + 1}"] = outputs, target
            return made
        if not home.last:
            gradient = self._derivative(layer, home.loss_gradient(micro, outputs, target), outputs)
            made[f"grad/{layer}/{self.device}"] = _Made(gradient)
        self.note_loss(micro)
        return made

    def _derivative(self, layer: int, gradient: Gradients, outputs: Tree) -> Gradients:
        """Multiply with the derivative of a layer's elementwise function, given its output."""
        linear = self.linears[layer]
        if linear is None or not self.flow.layers[layer].factor:
            return gradient
        with torch.no_grad():
            (found,) = gradient
            return [linear.derivative(torch.zeros_like(outputs) if found is None else found, outputs)]

    def _elementwise(self, job: Job, micro: Micro) -> dict[str, Any]:
        raw = self._gradient("raw", job, micro)
        assert raw is not None
        if self.tasks.factor:
            raw = self._derivative(self.layer, raw, self._use(f"input/{self.layer + 1}", micro)[0])
        return {f"grad/{self.layer}/{self.device}": _Made(raw)}

    def _input_gradient(self, job: Job, micro: Micro) -> dict[str, Any]:
        layer, share = self.layer, job.step.place
        gradient = self._gradient("grad", job, micro)
        weights, shape = self._weights(micro)
        inputs = self._use(f"input/{layer}", micro)[0] if self.tasks.rebuilds(self.device) else None
        found = self._differentiate(share, micro, gradient, weights, shape, inputs)
        count = shape[0] if shape else 0
        if self.flow.derivative_at(layer):
            begin, end = (0, None) if share.whole else rows(share, count)
            found = self._derivative(layer - 1, found, self._use(f"input/{layer}", micro)[0][begin:end])
        name = "grad" if self.flow.layers[layer - 1].elementwise is None else "raw"
        return {f"{name}/{layer - 1}/{self.device}": _Made(found, share, count)}

    def _weights(self, micro: Micro) -> tuple[list[Tensor], Sequence[int]]:
        """Weights that were sent here, and the shape of the layer's input if it is a linear map."""
        if self.home is not None:
            return [], self.home.shapes[micro.id] if isinstance(self.home, LinearHome) else ()
        weights, shape = self._use(f"weights/{self.layer}", micro)
        return weights, shape

    def _differentiate(
        self,
        share: Place,
        micro: Micro,
        gradient: Gradients | None,
        weights: list[Tensor],
        shape: Sequence[int],
        inputs: Tree,
    ) -> Gradients:
        """The input gradient, here or at home; the other gradient is kept if it comes along."""
        if self.home is not None:
            if isinstance(self.home, LinearHome):
                gradient = [self._own_rows(share, gradient, shape[0])]
            return self.home.input_gradient(micro, gradient)
        if isinstance(self.away, LinearAway):
            return self.away.input_gradient(self._own_rows(share, gradient, shape[0]), weights, shape)
        assert self.away is not None
        assert gradient is not None
        both = self.tasks.weight_gradient.device == self.device
        found = self.away.differentiate(micro, inputs, weights, gradient, for_inputs=True, for_weights=both)
        if both:
            self._weight_gradients[micro.id] = found.weights
        return found.inputs

    def _own_rows(self, share: Place, gradient: Gradients | None, count: int) -> Tensor:
        """The rows of a share, of a gradient of which this place has all rows or just those."""
        assert gradient is not None
        (delta,) = gradient
        assert delta is not None
        if self.flow.needed_rows(self.layer, self.device) is not None:
            return delta
        begin, end = rows(share, count)
        return delta[begin:end]

    def _weight_gradient(self, job: Job, micro: Micro) -> dict[str, Any]:
        if micro.id in self._weight_gradients:
            return {f"wgrad/{self.layer}": self._weight_gradients.pop(micro.id)}
        gradient = self._gradient("grad", job, micro)
        needs_inputs = self.tasks.kind == "linear" or self.tasks.rebuilds(self.device)
        inputs = self._use(f"input/{self.layer}", micro)[0] if needs_inputs else None
        if self.home is None:
            return {f"wgrad/{self.layer}": self._weight_gradient_away(micro, gradient, inputs)}
        found = self.home.weight_gradient(micro, gradient, inputs)
        if found is not None:
            self.home.receive(micro, found)
        return {}

    def _weight_gradient_away(self, micro: Micro, gradient: Gradients | None, inputs: Tree) -> Gradients:
        assert gradient is not None
        if isinstance(self.away, LinearAway):
            (delta,) = gradient
            assert delta is not None
            return self.away.weight_gradient(delta, inputs)
        assert self.away is not None
        weights, _ = self._weights(micro)
        return self.away.differentiate(micro, inputs, weights, gradient, for_inputs=False, for_weights=True).weights

    # --------------------------------------------------------------- weights and updates

    def _ship(self, job: Job, micro: Micro) -> dict[str, Any]:
        home = self._at_home()
        shape = home.shapes[micro.id] if isinstance(home, LinearHome) else ()
        return {f"weights/{self.layer}": (home.send_weights(micro), list(shape))}

    def _receive(self, job: Job, micro: Micro) -> dict[str, Any]:
        self._at_home().receive(micro, self._use(f"wgrad/{self.layer}", micro))
        return {}

    def _apply(self, job: Job, micro: Micro) -> dict[str, Any]:
        self._at_home().update()
        return {}

    def _at_home(self) -> Home:
        assert self.home is not None, "only a home runs the forward and keeps the weights"
        return self.home


def _stamps(value: Tree) -> tuple[int, ...]:
    return tuple(0 if t.is_inference() else t._version for t in leaves(value))


@cache
def _parsed(name: str) -> tuple[str, int]:
    """Kind and layer of a tensor."""
    kind, layer, *_ = name.split("/")
    return kind, int(layer)
