"""Gradients of a layer on a device other than its home, from tensors that were sent there.

A linear map needs no more than them. Any other layer is run forward once more, at the weights of its forward, with the
same random numbers and without counting in running statistics; this is the price of computing its gradient elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...nn.linear_map import LinearMap
from ...nn.randomness import replayable
from ...nn.statistics import frozen_statistics
from ...nn.tree import Tree, flatten, unflatten
from ...rules.weights import weights_at
from ...runtime.passes import autocast
from ...runtime.stage import Gradients, StageOptions
from ...transport.mail import Micro

__all__ = ["Both", "GraphAway", "LinearAway"]


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
            replayable(self.options.seed, self.layer, micro.id),
            self._statistics,
            autocast(self.options.precision),
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
