"""Which systems are worth a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UnlatchError
from ..methods import Method
from .subject import Subject
from .systems import DDP, Independent, Ours, Plain, System
from .torch_pipeline import ORDERS, TorchPipeline, fused_cut

__all__ = ["everybody"]


def everybody(
    subject: Subject,
    ranks: int,
    methods: Sequence[Method],
    microbatches: Sequence[int] = (2, 4, 8),
    *,
    compile: bool | str | Mapping[str, Any] = False,
) -> list[System]:
    """All systems for so many ranks; plain PyTorch with one thread and the limit, which others are related to, first.

    **Arguments:**

    - `methods`: ours.
    - `microbatches`: of torch's pipelines.
    - `compile`: how those that can are also compiled, as for `unlatch.parallelize`; each then has two rows.

    >>> from torch import nn, optim, zeros
    >>> one = Subject(lambda: nn.Linear(1, 1), lambda: (zeros(2, 1), zeros(2, 1)), nn.MSELoss(), optim.SGD)
    >>> [str(system) for system in everybody(one, 2, [], microbatches=[4])][:5]
    ['pytorch 1 thread', 'limit independent processes', 'pytorch 2 threads', 'pytorch DDP', 'torch pipelining gpipe x4']
    """
    starts: tuple[int, ...] = ()
    # A model that cannot be cut is for each pipeline to report, as the reason of its row.
    with contextlib.suppress(UnlatchError):
        starts = tuple(fused_cut(subject, ranks).starts)
    pipelines = [TorchPipeline(order, parts, starts) for order in ORDERS for parts in microbatches]
    ways = (False, compile) if compile else (False,)
    ours = [Ours(method, compile=way) for method in methods for way in ways]
    alone = [Plain(1, compile)] if compile else []
    return [Plain(), Independent(), *alone, Plain(ranks), DDP(), *pipelines, *ours]
