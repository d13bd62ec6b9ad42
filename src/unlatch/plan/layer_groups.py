"""Layers for the planner from the blocks of a model: what is trained, with what follows it and costs little."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import PlanError
from ..nn.chain import Block
from ..nn.chain_check import ties
from ..nn.linear_map import LinearMap, linear_map
from .layer_costs import LayerCost
from .profile import BlockCost

__all__ = ["Span", "group_blocks", "group_costs", "grouped_profile", "linear_of", "parameter_costs"]

Span = tuple[int, int]


def group_blocks(blocks: Sequence[Block]) -> list[Span]:
    """Begin a layer at every block with parameters; blocks without join the layer below, tied ones are one layer.

    >>> from torch import nn
    >>> from ..nn.chain import chain
    >>> group_blocks(chain([nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]))
    [(0, 3), (3, 4)]
    """
    trained = [n for n, block in enumerate(blocks) if any(p.requires_grad for p in block.module.parameters())]
    inside = {n for tie in ties(blocks) for n in range(tie.first + 1, tie.second + 1)}
    starts = [0, *(n for n in trained[1:] if n not in inside)]
    return list(zip(starts, [*starts[1:], len(blocks)], strict=True))


def grouped_profile(found: Sequence[BlockCost], spans: Sequence[Span]) -> list[LayerCost]:
    """Measured costs of layers.

    >>> a, b = BlockCost("a", 1.0, 0.0, 1.0, 8, 8, 4), BlockCost("b", 1.0, 2.0, 1.0, 8, 8, 4)
    >>> grouped_profile([a, b], [(0, 2)])[0].G
    4.0
    """
    layers = []
    for start, end in spans:
        part = found[start:end]
        inputs, weights = sum(c.input_grad for c in part), sum(c.weight_grad for c in part)
        # The first layer has no D: what its inner blocks need to reach its weights belongs to G.
        before, after = (0.0, inputs + weights) if start == 0 else (inputs, weights)
        layers.append(
            LayerCost(
                part[0].name,
                sum(c.forward for c in part),
                before,
                after,
                activation_bytes=part[-1].output_bytes,
                weight_bytes=sum(c.weight_bytes for c in part),
                kept_bytes=sum(c.kept_bytes for c in part),
            )
        )
    return layers


def group_costs(given: Sequence[LayerCost], blocks: Sequence[Block], spans: Sequence[Span]) -> list[LayerCost]:
    """Costs that the user gave, per layer or per block."""
    if len(given) == len(spans):
        return list(given)
    if len(given) != len(blocks):
        raise PlanError(
            f"there are costs of {len(given)} layers, but the model has {len(blocks)} blocks in {len(spans)} layers: "
            f"give one entry per block or per layer; the layers begin at {[blocks[start].name for start, _ in spans]}"
        )
    layers = []
    for start, end in spans:
        part = given[start:end]
        layers.append(
            LayerCost(
                part[0].name,
                sum((c.F for c in part), start=0),
                sum((c.D for c in part), start=0),
                sum((c.G for c in part), start=0),
                activation_bytes=part[-1].activation_bytes,
                weight_bytes=sum((c.weight_bytes for c in part), start=0),
                hadamard=part[0].hadamard,
            )
        )
    return layers


def parameter_costs(blocks: Sequence[Block], spans: Sequence[Span]) -> list[LayerCost]:
    """A guess where nothing is measured: all three tasks in proportion to the number of parameters."""
    layers = []
    for start, end in spans:
        params = {id(p): p.numel() for block in blocks[start:end] for p in block.module.parameters()}
        count = 1 + sum(params.values())
        layers.append(LayerCost(blocks[start].name, count, count, count, weight_bytes=4 * count))
    return layers


def linear_of(blocks: Sequence[Block], span: Span, precision: str) -> LinearMap | None:
    """The linear map that a layer is; none under autocast, where autograd has to keep track of dtypes."""
    return linear_map([block.module for block in blocks[span[0] : span[1]]]) if precision == "fp32" else None
