"""How much the time of the same work varies on this machine, which makes pipelines wait even if they are balanced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ..errors import PlanError
from ..nn.chain import Block
from ..nn.randomness import replayable
from ..nn.tree import Tree
from .passes import ChainCopy, timed_pass

__all__ = ["jitter", "relative_spread"]


def jitter(
    blocks: Sequence[Block],
    x: Tree,
    loss: Callable[[Tree], Tensor] | None = None,
    *,
    training: bool = True,
    repeats: int = 12,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> float:
    """Measure the jitter of a stage: how much its forwards, and its backwards, differ in time from one to the next.

    It is what `Machine(jitter=...)` takes. Parts of a stage vary more than the whole stage, and not independently, so
    give the blocks of one stage; all their graphs are kept at the same time.

    **Arguments:**

    - `blocks`: of the stage; they are copied, so nothing of them changes.
    - `x`: one micro-batch, as the first of them takes it.
    - `loss`: of the last output, if the stage is the last one.
    - `training`, `precision`: as in `profile`.
    - `repeats`: forwards and backwards, after one that warms up.

    **Returns:** standard deviation over mean. Slow drifts of the machine's speed do not count: see `relative_spread`.

    >>> from torch import nn
    >>> from ..nn.chain import chain
    >>> jitter(chain([nn.Linear(4, 8), nn.Linear(8, 2)]), torch.randn(16, 4)) > 0
    True
    """
    if repeats < 2:
        raise PlanError(f"jitter is a difference between repeats: expected at least 2, got repeats={repeats}")
    chain = ChainCopy(blocks, x, loss, training=training, precision=precision)
    stage = [range(len(blocks))]
    with replayable(0, 0, 0), torch.enable_grad():
        timed_pass(chain, stage)
        passes = [timed_pass(chain, stage) for _ in range(repeats)]
    forwards = [sum(block.forward for block in times) for times in passes]
    backwards = [sum(block.backward for block in times) for times in passes]
    # Both are actions of the same simulation, which knows one jitter: the longer ones count for more.
    actions = [(sum(times), relative_spread(times)) for times in (forwards, backwards) if all(times)]
    total = sum(time for time, _ in actions)
    return math.sqrt(sum(time * spread**2 for time, spread in actions) / total) if total else 0.0


def relative_spread(times: Sequence[float]) -> float:
    """Standard deviation over mean of log-normal times, from how much neighbours differ.

    If the machine becomes slower over minutes, neighbours hardly notice, but the overall deviation would.

    **Arguments:** `times`: of the same work, in the order in which they were measured.

    >>> round(relative_spread([1.0, 1.1, 1.0, 1.1]), 3)
    0.067
    >>> relative_spread([5.0, 5.0, 5.0])
    0.0
    """
    if len(times) < 2 or not all(0 < time < math.inf for time in times):
        raise PlanError(f"the spread of times needs at least 2 of them, all positive and finite, got {list(times)}")
    # The difference of two independent values has twice the variance of one.
    variance = sum(math.log(b / a) ** 2 for a, b in pairwise(times)) / (2 * (len(times) - 1))
    return math.sqrt(math.expm1(variance))
