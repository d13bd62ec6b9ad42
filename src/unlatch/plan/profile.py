"""What each block costs: time of forward and of both halves of the backward, and bytes.

Measured on a copy of the blocks, with the user's own sample. Passes go through the whole chain several times and the
fastest time of each block counts: whatever else the machine does can only make it slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import PlanError
from ..nn.chain import Block
from ..nn.randomness import replayable
from ..nn.tree import Tree, flatten, tree_bytes
from .passes import BlockTimes, ChainCopy, timed_pass, windows

__all__ = ["BlockCost", "profile"]

_BUDGET = 1.0
_FEWEST, _MOST = 2, 60
_CENTRES: dict[str, Callable[[Sequence[float]], float]] = {"best": min, "mean": statistics.fmean}


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
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    centre: Literal["best", "mean"] = "best",
) -> list[BlockCost]:
    """Measure every block of a chain.

    **Arguments:**

    - `blocks`: the chain; it is copied, so nothing of it changes.
    - `x`: one micro-batch, as the first block takes it.
    - `loss`: of the last output; its time is added to the last block.
    - `training`: mode of the blocks.
    - `repeats`: how often each half of the backward is measured, after one pass that warms up; by default as often as
        takes about a second.
    - `precision`: `"bf16"` runs the forward under autocast.
    - `centre`: which of a block's times counts. The `"best"` compares blocks; the `"mean"` adds up to the mean of
        many blocks, hiccups of the machine included, and goes with `jitter`, which varies times around their mean.

    >>> from torch import nn
    >>> from ..nn.chain import chain
    >>> costs = profile(chain([nn.Linear(4, 8), nn.Linear(8, 2)]), torch.randn(16, 4), repeats=1)
    >>> [cost.output_bytes for cost in costs], costs[0].input_grad
    ([512, 128], 0.0)
    """
    if repeats is not None and repeats < 1:
        raise PlanError(f"a profile needs at least 1 repeat, got repeats={repeats}")
    if centre not in _CENTRES:
        raise PlanError(f"the centre of a block's times is one of {', '.join(_CENTRES)}, got {centre!r}")
    chain = ChainCopy(blocks, x, loss, training=training, precision=precision)
    with replayable(0, 0, 0), torch.enable_grad():
        started = perf_counter()
        timed_pass(chain, windows([1] * len(blocks), limit=1))
        if repeats is None:
            # One repeat is two passes.
            repeats = min(max(int(_BUDGET / (perf_counter() - started) / 2), _FEWEST), _MOST)
        sizes = _count_bytes(chain)
        parts = windows([output + kept for output, kept, _ in sizes])
        halves, wholes = [], []
        for _ in range(repeats):
            halves.append(timed_pass(chain, parts, whole=False))
            wholes.append(timed_pass(chain, parts))
    middle = _CENTRES[centre]
    costs = []
    for position, block in enumerate(blocks):
        half: list[BlockTimes] = [times[position] for times in halves]
        full: list[BlockTimes] = [times[position] for times in wholes]
        if not any(parameter.requires_grad for parameter in chain.runners[position].parameters()):
            # Without weights to train both kinds of pass do the same; their noise is no cost of weights.
            half = full = [*half, *full]
        forward = middle([times.forward for times in (*half, *full)])
        input_grad = middle([times.backward for times in half])
        backward = middle([times.backward for times in full])
        costs.append(BlockCost(block.name, forward, input_grad, max(backward - input_grad, 0.0), *sizes[position]))
    return costs


def _count_bytes(chain: ChainCopy) -> list[tuple[int, int, int]]:
    """Bytes of output, kept tensors and weights of every block."""
    found, x = [], chain.x
    counted: set[int] = set()
    for index, runner in enumerate(chain.runners):
        own = {_address(tensor) for tensor in (*runner.parameters(), *runner.buffers())}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
            if _address(tensor) not in own:
                kept[_address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            x = chain.run(index, chain.entry(index, x))
        new = sum(size for address, size in kept.items() if address not in counted)
        # Addresses stay meaningful only while the memory is alive: that of what goes on to the next block.
        counted = {_address(tensor) for tensor in flatten(x)[0]} & (counted | kept.keys())
        weights = sum(parameter.numel() * parameter.element_size() for parameter in runner.parameters())
        found.append((tree_bytes(x), new, weights))
    return found


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
