"""Timed passes through a chain, in the order of training: forward through many blocks first, then backward.

A backward right after the forward of the same block finds its activations in the caches, which training never does.
Blocks are cut off from each other all the same, so that each can be timed by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import PlanError
from ..nn.chain import Block, StageChain
from ..nn.chain_check import one_argument
from ..nn.device import Device
from ..nn.tree import Tree, flatten, map_tensors

__all__ = ["BlockTimes", "ChainCopy", "timed_pass", "windows"]

_WINDOW_BYTES = 512 << 20


class BlockTimes(NamedTuple):
    """Seconds of one block in one pass; the backward is the whole one or only its first half."""

    forward: float
    backward: float


class ChainCopy:
    """A copy of a chain, run block by block with one sample.

    **Arguments:** as in `profile`.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        x: Tree,
        loss: Callable[[Tree], Tensor] | None = None,
        *,
        training: bool = True,
        precision: str = "fp32",
    ) -> None:
        self.names = [block.name for block in blocks]
        self.runners = _copies(blocks, training)
        self.x = x
        self._loss = loss
        self._precision = precision

    def entry(self, index: int, x: Tree) -> Tree:
        """The input of a block, cut off from what made it; nobody asks for the gradient of the sample itself."""
        return map_tensors(_leaf if index else Tensor.detach, x)

    def run(self, index: int, x: Tree) -> Tree:
        """The forward of one block, and after the last one the loss."""
        device = next((tensor.device.type for tensor in flatten(x)[0]), "cpu")
        with self.naming(index, x), Device(device).autocast(self._precision):
            y = self.runners[index](x)
            return self._loss(y) if self._loss is not None and index == len(self.names) - 1 else y

    @contextmanager
    def naming(self, index: int, x: Tree = None) -> Iterator[None]:
        """Errors in here name the block. **Arguments:** `x`: what it is given, where that may be the reason."""
        try:
            yield
        except Exception as error:
            hint = one_argument(x) if x is not None else ""
            raise PlanError(f"block '{self.names[index]}' fails on the sample: {error}{hint}") from error


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


def windows(sizes: Sequence[int], limit: int = _WINDOW_BYTES) -> list[range]:
    """Consecutive blocks whose graphs may be kept at the same time; a block over the limit is by itself.

    **Arguments:**

    - `sizes`: bytes that each block keeps.
    - `limit`: most bytes of a window.

    >>> windows([3, 4, 9, 1, 1, 1], limit=8)
    [range(0, 2), range(2, 3), range(3, 6)]
    """
    found, start, total = [], 0, 0
    for position, size in enumerate(sizes):
        if position > start and total + size > limit:
            found.append(range(start, position))
            start, total = position, 0
        total += size
    return [*found, range(start, len(sizes))]


def timed_pass(chain: ChainCopy, parts: Sequence[range], *, whole: bool = True) -> list[BlockTimes]:
    """Go through the chain once, window by window: up through its blocks, then down.

    **Arguments:**

    - `parts`: windows of blocks, in order.
    - `whole`: whether the backward computes all gradients, or only those of the blocks' inputs. Doing one after the
        other on the same graph would hand the second one warm caches, so each pass does one of them.
    """
    x = chain.x
    forward, backward = [0.0] * len(chain.names), [0.0] * len(chain.names)
    for part in parts:
        kept: list[tuple[Tree, Tree]] = []
        for index in part:
            entry = chain.entry(index, x)
            start = _now()
            y = chain.run(index, entry)
            forward[index] = _now() - start
            kept.append((entry, y))
            x = map_tensors(Tensor.detach, y)
        for index in reversed(part):
            with chain.naming(index):
                backward[index] = _backward(chain.runners[index] if whole else None, *kept.pop())
    return [BlockTimes(*times) for times in zip(forward, backward, strict=True)]


def _backward(runner: StageChain | None, entry: Tree, y: Tree) -> float:
    """Seconds that the gradients of the input take, together with those of the parameters of `runner`."""
    params = runner.parameters() if runner is not None else ()
    wanted = [tensor for tensor in (*flatten(entry)[0], *params) if tensor.requires_grad]
    outputs = [tensor for tensor in flatten(y)[0] if tensor.requires_grad]
    if not wanted or not outputs:
        return 0.0
    grads = [torch.ones_like(tensor) for tensor in outputs]
    start = _now()
    torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
    return _now() - start


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _now() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return perf_counter()
