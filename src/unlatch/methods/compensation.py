"""Choosing how many batches to process as one: measure the slowest stage, take the smallest count that is nearly best.

The rule is a reconstruction (inferred, not published): the smallest `m` whose throughput `m B / T(m)` is within 5 % of
the best, under a memory cap.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from ..nn.chain import Block, StageChain
from ..nn.tree import Tree, batch_size, flatten, map_tensors
from ..rules.losses import measured

__all__ = ["choose_compensation"]

CANDIDATES = (1, 2, 4, 8)
TOLERANCE = 0.05


def choose_compensation(
    stages: Sequence[Sequence[Block]],
    sample: tuple[Tree, Tree],
    loss_fn: Any,
    *,
    candidates: Sequence[int] = CANDIDATES,
    memory_cap: int | None = None,
    repeats: int = 3,
) -> tuple[int, str]:
    """Measure a tick of the slowest stage for several batch sizes and choose.

    **Returns:** the count and a sentence that says why.
    """
    cap = memory_cap if memory_cap is not None else psutil.virtual_memory().available // 4
    modules = [copy.deepcopy(StageChain(part)).train() for part in stages]
    size = batch_size(sample[0])
    rates: dict[int, float] = {}
    for m in candidates:
        x, y = map_tensors(lambda t, m=m: torch.cat([t] * m), sample)  # type: ignore[misc]
        seconds, kept = _tick(modules, x, y, loss_fn, repeats)
        if kept > cap:
            break
        rates[m] = m * size / seconds
    if not rates:
        return 1, f"batch compensation: kept at 1, since even one batch needs more than {cap / 1e6:.0f} MB"
    best = max(rates.values())
    chosen = min(m for m, rate in rates.items() if rate >= (1 - TOLERANCE) * best)
    found = ", ".join(f"{m}: {rate:.0f}/s" for m, rate in rates.items())
    return chosen, (
        f"batch compensation: {chosen} batch(es) of {size} as one, the smallest count within {TOLERANCE:.0%} of the "
        f"best throughput of the slowest stage (samples per second by count: {found})"
    )


def _tick(modules: list[Any], x: Tree, y: Tree, loss_fn: Any, repeats: int) -> tuple[float, int]:
    """Seconds of the slowest stage for one tick of DTR, and the bytes of all inputs that the stages keep."""
    slowest, kept = 0.0, 0
    for index, module in enumerate(modules):
        later = len(modules) - 1 - index
        last = later == 0
        # All stages but the first hand a gradient down.
        inputs = map_tensors(lambda t, wanted=index > 0: _leaf(t, wanted=wanted), x)  # type: ignore[misc]
        # The last one is done with its input before the next comes.
        kept += max(1, 2 * later) * sum(t.nbytes for t in flatten(inputs)[0])
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            if not last:
                with torch.no_grad():
                    x = module(inputs)
            outputs = module(inputs)
            if last:
                outputs = measured(loss_fn(outputs, y))[0]
            torch.autograd.backward([t.sum() for t in flatten(outputs)[0] if t.requires_grad])
            seconds.append(time.perf_counter() - start)
        slowest = max(slowest, min(seconds))
    return slowest, kept


def _leaf(t: Tensor, *, wanted: bool) -> Tensor:
    return t.detach().requires_grad_(wanted and t.is_floating_point())
