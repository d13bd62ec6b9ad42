"""Costs of a real model without running it: multiply-accumulates counted on the meta device, from shapes alone.

Only products count (convolutions, matrix products, attention); what goes element by element is free. For times that
include everything, measure with `profile`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import PlanError
from ..nn.chain import Block
from ..nn.tree import Tree, flatten, map_tensors, tree_bytes
from .layer_costs import LayerCost, as_chain

__all__ = ["model_costs"]


def model_costs(blocks: Sequence[Block], x: Tree) -> list[LayerCost]:
    """Multiply-accumulates and bytes of every block.

    **Arguments:**

    - `blocks`: the chain, from `unlatch.nn.chain`; it is copied, so nothing of it changes.
    - `x`: one mini-batch, or tensors on the meta device of the same shapes.

    >>> from ..nn.chain import chain
    >>> costs = model_costs(chain([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]), torch.empty(16, 4, device="meta"))
    >>> [(cost.F, cost.D, cost.G) for cost in costs]
    [(512, 0, 512), (0, 0, 0), (256, 256, 256)]
    """
    value = map_tensors(_to_meta, x)
    costs = []
    for number, block in enumerate(blocks):
        module = copy.deepcopy(block.module).to("meta")
        try:
            value, cost = _block(block.name, module, value, first=number == 0)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise PlanError(
                f"block {number} ({block.name!r}) cannot be counted from shapes alone: {error}. "
                "Measure it with profile() instead"
            ) from error
        costs.append(cost)
    return as_chain(costs)


def _block(name: str, module: nn.Module, value: Tree, first: bool) -> tuple[Tree, LayerCost]:
    entry = map_tensors(_fresh_leaf, value)
    inputs = [t for t in flatten(entry)[0] if t.requires_grad and not first]
    weights = [p for p in module.parameters() if p.requires_grad]
    forward = FlopCounterMode(display=False)
    with torch.enable_grad(), forward:
        output = module(entry)
    outputs = [t for t in flatten(output)[0] if t.requires_grad]
    both = _backward(outputs, [*inputs, *weights])
    down = _backward(outputs, inputs)
    cost = LayerCost(
        name,
        _macs(forward),
        down,
        both - down,
        activation_bytes=tree_bytes(output),
        weight_bytes=sum(p.nbytes for p in weights),
    )
    return map_tensors(Tensor.detach, output), cost


def _backward(outputs: list[Tensor], wanted: Sequence[Tensor]) -> int:
    if not outputs or not wanted:
        return 0
    grads = [torch.empty_like(t) for t in outputs]
    counter = FlopCounterMode(display=False)
    with counter:
        torch.autograd.grad(outputs, wanted, grads, retain_graph=True, allow_unused=True)
    return _macs(counter)


def _macs(counter: FlopCounterMode) -> int:
    return int(counter.get_total_flops()) // 2


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.detach().to("meta")


def _fresh_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())
