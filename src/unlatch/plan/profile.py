"""What each block costs: time of forward and of both halves of the backward, and bytes.

Measured on a copy of the blocks, with the user's own sample. Passes go through the whole chain several times and the
fastest time of each block counts: whatever else the machine does can only make it slower.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import PlanError
from ..nn.chain import Block, StageChain
from ..nn.randomness import replayable
from ..nn.tree import Tree, flatten, map_tensors, tree_bytes

__all__ = ["BlockCost", "profile"]

_BUDGET = 1.0
_FEWEST, _MOST = 2, 60


@dataclass(frozen=True)
class BlockCost:
    """What one block costs for one micro-batch: seconds and bytes."""

    name: str
    forward: float
    #: Gradient of the block's input; zero for the first block, which needs none.
    input_grad: float
    #: The rest of the backward.
    weight_grad: float
    #: What crosses the border if the chain is cut after this block.
    output_bytes: int
    #: What autograd keeps for the backward, without parameters. Memory that two blocks keep is counted for the first.
    kept_bytes: int
    weight_bytes: int

    def to_json(self) -> dict[str, Any]:
        """All fields as plain numbers and texts."""
        return asdict(self)


def profile(
    blocks: Sequence[Block],
    x: Tree,
    loss: Callable[[Tree], Tensor] | None = None,
    *,
    training: bool = True,
    repeats: int | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> list[BlockCost]:
    """Measure every block of a chain.

    **Arguments:**

    - `blocks`: the chain; it is copied, so nothing of it changes.
    - `x`: one micro-batch, as the first block takes it.
    - `loss`: of the last output; its time is added to the last block.
    - `training`: mode of the blocks.
    - `repeats`: passes through the chain after one that warms up; by default as many as take about a second.
    - `precision`: `"bf16"` runs the forward under autocast.

    >>> from ..nn.chain import chain
    >>> costs = profile(chain([nn.Linear(4, 8), nn.Linear(8, 2)]), torch.randn(16, 4), repeats=1)
    >>> [cost.output_bytes for cost in costs], costs[0].input_grad
    ([512, 128], 0.0)
    """
    runners = _copies(blocks, training)
    times = [[float("inf")] * 3 for _ in blocks]
    with replayable(0, 0, 0), torch.enable_grad():
        started = perf_counter()
        list(_pass(blocks, runners, x, loss, precision, measure=_measure_time))
        if repeats is None:
            repeats = min(max(int(_BUDGET / (perf_counter() - started)), _FEWEST), _MOST)
        sizes = list(_pass(blocks, runners, x, loss, precision, measure=_ByteCounter()))
        for _ in range(repeats):
            for best, new in zip(times, _pass(blocks, runners, x, loss, precision, measure=_measure_time), strict=True):
                best[:] = map(min, best, new)
    return [
        BlockCost(block.name, forward, input_grad, max(backward - input_grad, 0.0), *size)
        for block, (forward, input_grad, backward), size in zip(blocks, times, sizes, strict=True)
    ]


def _copies(blocks: Sequence[Block], training: bool) -> list[StageChain]:
    """Copies made in one go, so that what blocks share stays shared; each leaves its input as it is."""
    try:
        modules = copy.deepcopy([block.module for block in blocks])
    except Exception as error:
        raise PlanError(
            f"the blocks cannot be copied, so they cannot be measured without touching them ({error}): "
            "name the blocks that start a stage instead of split='auto'"
        ) from error
    return [StageChain([Block(b.name, module)]).train(training) for b, module in zip(blocks, modules, strict=True)]


Run = Callable[[Tree], Tree]


def _pass(
    blocks: Sequence[Block],
    runners: Sequence[StageChain],
    x: Tree,
    loss: Callable[[Tree], Tensor] | None,
    precision: str,
    measure: Callable[[Run, StageChain, Tree], tuple[Any, Tree]],
) -> Iterator[Any]:
    """Go through the chain once, each block cut off from the one before, and yield what is measured."""
    for index, (block, runner) in enumerate(zip(blocks, runners, strict=True)):
        x = map_tensors(_leaf if index else Tensor.detach, x)
        device = next((tensor.device.type for tensor in flatten(x)[0]), "cpu")

        def run(x: Tree, runner: nn.Module = runner, last: bool = index == len(blocks) - 1, on: str = device) -> Tree:
            with torch.autocast(on, torch.bfloat16, enabled=precision == "bf16"):
                y = runner(x)
                return loss(y) if last and loss is not None else y

        try:
            found, x = measure(run, runner, x)
        except Exception as error:
            raise PlanError(f"block '{block.name}' fails on the sample: {error}") from error
        yield found


def _measure_time(run: Run, runner: StageChain, x: Tree) -> tuple[tuple[float, float, float], Tree]:
    """Seconds of forward, of the gradient of the input, and of the whole backward."""
    inputs = [tensor for tensor in flatten(x)[0] if tensor.requires_grad]
    params = [parameter for parameter in runner.parameters() if parameter.requires_grad]
    start = _now()
    y = run(x)
    forward = _now() - start
    outputs = [tensor for tensor in flatten(y)[0] if tensor.requires_grad]
    grads = [torch.ones_like(tensor) for tensor in outputs]
    input_grad = backward = 0.0
    if outputs and inputs:
        start = _now()
        torch.autograd.grad(outputs, inputs, grads, retain_graph=bool(params), allow_unused=True)
        input_grad = backward = _now() - start
    if outputs and params:
        start = _now()
        torch.autograd.grad(outputs, [*inputs, *params], grads, allow_unused=True)
        backward = _now() - start
    return (forward, input_grad, backward), y


class _ByteCounter:
    """Bytes of output, kept tensors and weights of one block after the other."""

    def __init__(self) -> None:
        self._counted: set[int] = set()

    def __call__(self, run: Run, runner: StageChain, x: Tree) -> tuple[tuple[int, int, int], Tree]:
        own = {_address(tensor) for tensor in (*runner.parameters(), *runner.buffers())}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if _address(tensor) not in own:
                kept[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = run(x)
        new = sum(size for address, size in kept.items() if address not in self._counted)
        # Addresses stay meaningful only while the memory is alive: that of what goes on to the next block.
        self._counted = {_address(tensor) for tensor in flatten(y)[0]} & (self._counted | kept.keys())
        weights = sum(parameter.numel() * parameter.element_size() for parameter in runner.parameters())
        return (tree_bytes(y), new, weights), y


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _now() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()
