"""Reversible networks in ordinary training: activation memory that does not grow with depth.

`reversible(model)` runs each longest run of reversible blocks as one autograd function that keeps only the run's
output. Its backward goes down from there, see `inversion`. Gradients are those of the stored graph up to rounding;
parameters are inputs of the function, so hooks, `torch.autograd.grad` and DistributedDataParallel see what they always
see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import PlanError
from .branch import as_stream
from .chain import Model, as_module, chain
from .coupling import Coupling, RevBlock, Streams
from .inverse_check import check_inverse, check_reversible
from .inversion import (
    Pass,
    Segment,
    Unit,
    checked_pass,
    differentiate,
    draw_seeds,
    invert,
    invert_and_differentiate,
    is_reversible,
    segments,
    units,
)
from .permutation import Merge, Permutation, SpaceToDepth, Split
from .statistics import frozen_statistics
from .tree import Structure, Tree, flatten, map_tensors, unflatten

__all__ = [
    "Coupling",
    "Merge",
    "Permutation",
    "RevBlock",
    "ReversibleChain",
    "Segment",
    "SpaceToDepth",
    "Split",
    "Streams",
    "check_inverse",
    "check_reversible",
    "invert",
    "invert_and_differentiate",
    "is_reversible",
    "reversible",
    "segments",
]


def reversible(model: Model, *, bn: Pass = "forward") -> ReversibleChain:
    """Make a module that computes what `model` does but keeps no activations inside runs of reversible blocks.

    **Arguments:**

    - `model`: an `nn.Sequential`, a list of modules, or a module with `blocks()`. Blocks that are not reversible are
      run as always.
    - `bn`: the pass that updates running statistics, `"forward"` or `"backward"`; once per batch in both cases. A
      forward that no backward can follow (`torch.no_grad`) updates them itself.

    **Returns:** a module with the same parameters under the same names.

    >>> branch = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> model = reversible(nn.Sequential(Split(), *(Coupling(branch()) for _ in range(8)), Merge(), nn.Linear(8, 1)))
    >>> model(torch.randn(16, 8)).sum().backward()
    """
    return ReversibleChain(model, bn=bn)


class ReversibleChain(nn.Module):
    """What `reversible` returns."""

    def __init__(self, model: Model, *, bn: Pass = "forward") -> None:
        super().__init__()
        root = as_module(model)
        # The same tables, hence the same names, whatever attributes the model and its blocks use.
        for table in ("_parameters", "_buffers", "_modules"):
            self.__dict__[table] = root.__dict__[table]
        self.bn: Pass = checked_pass(bn)
        self.segments = tuple(segments(chain(root)))
        if not any(segment.reversible for segment in self.segments):
            names = ", ".join(block.name for segment in self.segments for block in segment.blocks)
            raise PlanError(
                f"no block is reversible: use Coupling, or modules with a method inverse(); the blocks are {names}"
            )

    def forward(self, x: Tree) -> Tree:
        for segment in self.segments:
            if segment.reversible:
                x = _run(segment, x, self.bn)
            else:
                for block in segment.blocks:
                    x = block.module(x)
        return x


@dataclass
class _Call:
    """One pass through a run: what its backward must know besides the output."""

    parts: list[Unit]
    seeds: list[int | None]
    bn: Pass
    inputs: int
    structure: Structure
    params: list[tuple[str, nn.Parameter]]
    versions: list[int]
    output: Structure = field(default_factory=list)
    autocast: tuple[str, bool, torch.dtype] | None = None


def _run(segment: Segment, x: Tree, bn: Pass) -> Tree:
    x = map_tensors(as_stream, x)
    tensors, structure = flatten(x)
    parts = [unit for block in segment.blocks for unit in units(block.module, f"{block.name}.")]
    params = [
        (unit.prefix + name, parameter)
        for unit in parts
        for name, parameter in unit.module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]
    if not torch.is_grad_enabled() or not (params or any(tensor.requires_grad for tensor in tensors)):
        for block in segment.blocks:
            x = block.module(x)
        return x
    distinct = list({id(parameter): parameter for _, parameter in params}.values())
    versions = [parameter._version for parameter in distinct]
    call = _Call(parts, draw_seeds(parts), bn, len(tensors), structure, params, versions)
    device = tensors[0].device.type
    call.autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    outputs: tuple[Tensor, ...] = _Run.apply(call, *tensors, *distinct)  # type: ignore[no-untyped-call]
    return unflatten(call.output, outputs)


class _Run(torch.autograd.Function):
    """A run of reversible units that keeps its output only."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        state = unflatten(call.structure, tensors[: call.inputs])
        for unit, seed in zip(call.parts, call.seeds, strict=True):
            with frozen_statistics(unit.module) if call.bn == "backward" else nullcontext():
                if isinstance(unit.module, Coupling):
                    state = unit.module.forward_seeded(state, seed)
                else:
                    state = unit.module(state)
        outputs, call.output = flatten(state)
        ctx.call = call
        ctx.weights = tensors[call.inputs :]
        ctx.save_for_backward(*outputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if [weight._version for weight in ctx.weights] != call.versions:
            raise RuntimeError(
                "a parameter of a reversible run was modified in place between its forward and its backward, so the "
                "input can no longer be reconstructed: call backward before optimizer.step()"
            )
        # Gradients are taken with respect to aliases, else hooks of a parameter would run here and once more outside.
        aliases = {id(weight): weight.detach().requires_grad_() for weight in ctx.weights}
        params = {name: aliases[id(weight)] for name, weight in call.params}
        state = unflatten(call.output, ctx.saved_tensors)
        with _autocast_as_in(call):
            _, grad = differentiate(
                call.parts, call.seeds, state, unflatten(call.output, grads), params=params, bn=call.bn
            )
        inputs = flatten(grad)[0]
        wanted = ctx.needs_input_grad[1 : 1 + call.inputs]
        return (
            None,
            *(g if needed else None for g, needed in zip(inputs, wanted, strict=True)),
            *(alias.grad for alias in aliases.values()),
        )


@contextmanager
def _autocast_as_in(call: _Call) -> Iterator[None]:
    assert call.autocast is not None
    device, enabled, dtype = call.autocast
    # Aliases of the weights live for one pass: caching their casts would only hold memory.
    with torch.autocast(device, dtype, enabled, cache_enabled=False):
        yield
