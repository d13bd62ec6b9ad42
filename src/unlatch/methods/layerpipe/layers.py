"""A layer at home, where its forward runs and its weights live, and away from home, where gradients are computed.

At home it has one of three forms. What is computed elsewhere comes back as gradients of the weights; what is needed
elsewhere leaves as weights. Away from home a linear map needs no more than the tensors that were sent there. Any other
layer is run forward once more, at the weights of its forward, with the same random numbers and without counting in
running statistics; this is the price of computing its gradient elsewhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn.linear_map import LinearMap
from ...nn.statistics import frozen_statistics
from ...nn.tree import Tree, flatten, map_tensors, unflatten
from ...plan.dataflow import LayerTasks
from ...rules.bundle import Rules
from ...rules.weights import weights_at
from ...runtime.stage import Gradients, Kept, Stage, StageOptions
from ...transport.mail import Micro

__all__ = ["GraphAway", "GraphHome", "Home", "LinearAway", "LinearHome", "WholeHome"]


class Home(Stage):
    """What all forms have in common.

    **Arguments** (besides those of `Stage`):

    - `layer`: its place among the layers, which random numbers depend on; `index` also counts devices without one.
    - `tasks`: where the tasks of the layer are done.
    - `last`: whether the loss follows.
    - `weight_receivers`: to how many devices its weights are sent for each micro-batch.
    - `factor`: on every learning rate.
    """

    def __init__(
        self,
        index: int,
        stages: int,
        module: nn.Module,
        rules: Rules,
        options: StageOptions,
        *,
        layer: int,
        tasks: LayerTasks,
        last: bool,
        weight_receivers: int = 0,
        factor: float = 1.0,
        delay: int = 0,
    ) -> None:
        super().__init__(index, stages, module, rules, options, delay=delay)
        self.layer = layer
        self.tasks = tasks
        # Unless its graph ends with the loss, that is computed beside it.
        self.last = last and tasks.kind == "whole"
        self.updater.factor = factor
        self._weight_uses = weight_receivers + sum(d.device == tasks.home for d in tasks.input_gradient)
        self._uses_left: dict[int, int] = {}
        self._awaited: set[int] = set()

    @abstractmethod
    def input_gradient(self, micro: Micro, cotangent: Gradients | None) -> Gradients:
        """Its D, or the share of it that is done here: `cotangent` holds the rows of that share."""

    @abstractmethod
    def weight_gradient(self, micro: Micro, cotangent: Gradients | None, inputs: Tree) -> Gradients | None:
        """Its G, if that is done here. **Returns:** gradients in the order of `params`; `None` if added already."""

    def passing(self, kept: Kept) -> AbstractContextManager[Any]:
        return self.options.passing(self.layer, kept.micro.id)

    def loss_gradient(self, micro: Micro, outputs: Tree, target: Tree) -> Gradients:
        """The loss, and its gradient with respect to the layer's output."""
        tensors, spec = flatten(outputs)
        target = self.options.device.here(target)
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        with self.options.autocast():
            loss = self._checked_loss(self.options.loss_fn(unflatten(spec, leaves), target), micro)
            self.whole.add(micro, outputs, target, self.loss, self.count)
        wanted = [t for t in leaves if t.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
        return [next(found) if t.requires_grad else None for t in leaves]

    def behind(self, micro: Micro) -> int:
        """Updates since the forward of a micro-batch."""
        return self.version - self.kept[micro.id].version

    def receive(self, micro: Micro, gradients: Gradients) -> None:
        """Add the gradients of a micro-batch that were computed elsewhere, or without `.grad`."""
        for p, g in zip(self.params, gradients, strict=True):
            if g is not None:
                p.grad = g if p.grad is None else p.grad.add_(g)
        self._collected(micro)
        self._awaited.remove(micro.id)
        self._clear(micro)

    def send_weights(self, micro: Micro) -> list[Tensor]:
        """The weights that a task elsewhere must see; they never change afterwards."""
        kept = self.kept[micro.id]
        shown = self.backward_view.weights(kept, self.version, lasting=True)
        # What the next update writes into must not travel.
        values = [t.clone() if t.data_ptr() == p.data_ptr() else t for t, p in zip(shown, self.params, strict=True)]
        self._used(micro)
        return values

    def uses_state(self) -> dict[str, Any]:
        """Which uses of what is kept are still to come."""
        return {"uses_left": self._uses_left, "awaited": sorted(self._awaited)}

    def load_uses(self, state: Mapping[str, Any]) -> None:
        """Take over what `uses_state` returned."""
        self._uses_left, self._awaited = dict(state["uses_left"]), set(state["awaited"])

    def _enter(self, micro: Micro, kept: Kept) -> None:
        """Begin to count the uses of what is kept."""
        self.kept[micro.id] = kept
        self._uses_left[micro.id] = self._weight_uses
        self._awaited.add(micro.id)

    def _used(self, micro: Micro) -> None:
        self._uses_left[micro.id] -= 1
        self._clear(micro)

    def _clear(self, micro: Micro) -> None:
        """Let go of weights after their last use, and of everything once the gradient has come as well."""
        if self._uses_left[micro.id]:
            return
        self.kept[micro.id].weights = None
        if micro.id not in self._awaited:
            self.weighed(self.kept.pop(micro.id), 0)
            del self._uses_left[micro.id]


class WholeHome(Home):
    """All tasks here, on one graph: an ordinary stage."""

    def input_gradient(self, micro: Micro, cotangent: Gradients | None) -> Gradients:
        half = self.backward if self.tasks.fused else self.backward_input
        return half(micro, cotangent).gradients

    def weight_gradient(self, micro: Micro, cotangent: Gradients | None, inputs: Tree) -> None:
        if not self.tasks.input_gradient:
            self.backward(micro, cotangent)
        elif not self.tasks.fused:
            self.backward_weights(micro)


class GraphHome(Home):
    """Any layer with a gradient that is computed elsewhere. Its graph is kept if the other one is computed here."""

    def forward(self, micro: Micro, inputs: Tree, target: Tree = None) -> Tree:
        places = (*self.tasks.input_gradient, self.tasks.weight_gradient)
        if any(place.device == self.tasks.home for place in places):
            outputs = super().forward(micro, inputs)
            self._enter(micro, self.kept[micro.id])
            return outputs
        leaves, spec = flatten(inputs)
        kept = Kept(micro, self.version, [t.detach() for t in leaves], spec)
        with torch.no_grad(), self._forward_weights(kept):
            self.backward_view.note(kept)
            outputs = self.run(kept)
        kept.inputs = []
        self._enter(micro, kept)
        return map_tensors(Tensor.detach, outputs)

    def input_gradient(self, micro: Micro, cotangent: Gradients | None) -> Gradients:
        inputs = self.kept[micro.id].inputs
        found = iter(self._differentiate(micro, cotangent, [t for t in inputs if t.requires_grad]))
        gradients = [next(found) if t.requires_grad else None for t in inputs]
        self._used(micro)
        return gradients

    def weight_gradient(self, micro: Micro, cotangent: Gradients | None, inputs: Tree) -> Gradients:
        return self._differentiate(micro, cotangent, self.params)

    def _differentiate(self, micro: Micro, cotangent: Gradients | None, wanted: Sequence[Tensor]) -> Gradients:
        kept = self.kept[micro.id]
        with self._backward_weights(kept):
            roots, grads, _ = self.activation.roots(self, kept, cotangent)
            found = torch.autograd.grad(roots, wanted, grads, allow_unused=True) if roots and wanted else None
        kept.outputs = None
        return [None] * len(wanted) if found is None else list(found)


class LinearHome(Home):
    """A linear map: nothing is kept but the weights that the forward saw. Whoever computes G holds the input."""

    def __init__(self, *args: Any, linear: LinearMap, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.linear = linear
        self.shapes: dict[int, tuple[int, ...]] = {}

    def forward(self, micro: Micro, inputs: Tree, target: Tree = None) -> Tree:
        kept = Kept(micro, self.version, [inputs.detach()], "tensor")
        with torch.no_grad(), self._forward_weights(kept):
            self.backward_view.note(kept)
            outputs: Tensor = self.run(kept)
        kept.inputs = []
        if not self._weight_uses:
            kept.weights = None
        self.shapes[micro.id] = tuple(inputs.shape)
        self._enter(micro, kept)
        return outputs.detach()

    def input_gradient(self, micro: Micro, cotangent: Gradients | None) -> Gradients:
        assert cotangent is not None
        (delta,) = cotangent
        assert delta is not None
        shape = (delta.shape[0], *self.shapes[micro.id][1:])
        with torch.no_grad():
            found = self.linear.input_gradient(delta, self._seen_by_backward(micro), shape)
        self._used(micro)
        return [found]

    def weight_gradient(self, micro: Micro, cotangent: Gradients | None, inputs: Tree) -> Gradients:
        assert cotangent is not None
        (delta,) = cotangent
        assert delta is not None
        with torch.no_grad():
            return [*self.linear.weight_gradients(delta, inputs)]

    def _seen_by_backward(self, micro: Micro) -> list[Tensor]:
        return self.backward_view.weights(self.kept[micro.id], self.version)

    def uses_state(self) -> dict[str, Any]:
        return {**super().uses_state(), "shapes": self.shapes}

    def load_uses(self, state: Mapping[str, Any]) -> None:
        super().load_uses(state)
        self.shapes = dict(state["shapes"])

    def _clear(self, micro: Micro) -> None:
        super()._clear(micro)
        if micro.id not in self.kept:
            del self.shapes[micro.id]


class Both(NamedTuple):
    """Gradients of the input and of the weights, as far as they were asked for."""

    inputs: Gradients
    weights: Gradients


class LinearAway:
    """The two gradients of a linear map."""

    def __init__(self, linear: LinearMap) -> None:
        self.linear = linear

    @torch.no_grad()
    def input_gradient(self, delta: Tensor, weights: Sequence[Tensor], shape: Sequence[int]) -> Gradients:
        """Its D, or as many rows of it as `delta` has."""
        return [self.linear.input_gradient(delta, weights, (delta.shape[0], *shape[1:]))]

    @torch.no_grad()
    def weight_gradient(self, delta: Tensor, inputs: Tensor) -> Gradients:
        """Its G."""
        return [*self.linear.weight_gradients(delta, inputs)]


class GraphAway:
    """Runs a layer again and differentiates at once.

    **Arguments:** `layer`: its number, which its random numbers depend on.
    """

    def __init__(self, layer: int, module: nn.Module, options: StageOptions) -> None:
        self.layer = layer
        self.module = module
        self.options = options
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._statistics = frozen_statistics(module)

    def differentiate(
        self,
        micro: Micro,
        inputs: Tree,
        weights: Sequence[Tensor],
        cotangent: Gradients,
        *,
        for_inputs: bool,
        for_weights: bool,
    ) -> Both:
        """Both gradients, or one of them."""
        tensors, spec = flatten(inputs)
        leaves = [t.detach().requires_grad_(for_inputs and t.is_floating_point()) for t in tensors]
        # Graph and gradient under one roof: afterwards the parameters show their own values again.
        with (
            weights_at(self.params, weights),
            self.options.random(self.layer, micro.id),
            self._statistics,
            self.options.autocast(),
        ):
            outputs = flatten(self.module(unflatten(spec, leaves)))[0]
            pairs = [(y, g) for y, g in zip(outputs, cotangent, strict=True) if g is not None and y.requires_grad]
            wanted = [t for t in leaves if t.requires_grad] + (self.params if for_weights else [])
            found: tuple[Tensor | None, ...] = (None,) * len(wanted)
            if pairs and wanted:
                roots, grads = zip(*pairs, strict=True)
                found = torch.autograd.grad(roots, wanted, grads, allow_unused=True)
        rest = iter(found)
        input_gradients = [next(rest) if t.requires_grad else None for t in leaves]
        return Both(input_gradients, list(rest))
