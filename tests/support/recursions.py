"""A run beside the recursion that defines its method: every weight of every stage, and every loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from recording import feed
from small_nets import Batch
from unlatch.methods.base import Method
from unlatch.nn import StageChain, chain
from unlatch.plan import Plan
from unlatch.reference import SGD, Adam, Trajectory, recursion


def torch_optimizer(written: SGD | Adam) -> Callable[..., torch.optim.Optimizer]:
    """The factory of what a reference optimizer writes out."""
    return torch_sgd(written) if isinstance(written, SGD) else torch_adam(written)


def torch_adam(adam: Adam) -> Callable[..., torch.optim.Optimizer]:
    """The factory of Adam, or of AdamW."""
    kind = torch.optim.AdamW if adam.decoupled else torch.optim.Adam
    return partial(kind, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)


def torch_sgd(sgd: SGD) -> Callable[..., torch.optim.Optimizer]:
    """The factory of SGD."""
    return partial(
        torch.optim.SGD, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov, weight_decay=sgd.weight_decay
    )


def behind(lateness: Sequence[int], per_update: int = 1) -> Callable[[int, int], int]:
    """Forward versions of stages whose weights are this many micro-batches behind."""
    return lambda stage, micro: max(0, micro - lateness[stage]) // per_update


def begin(model: nn.Module, method: Any, optimizer: Any, loss_fn: Any = mse_loss, **options: Any) -> unlatch.Run:
    """A run of a chain in which every block is a stage, unless a `plan` is among the options."""
    if "plan" not in options:
        names = [block.name for block in chain(model)]
        options |= {"stages": len(names), "split": names[1:]}
    return unlatch.parallelize(model, method, loss_fn=loss_fn, optimizer=optimizer, **options)


def follow_recursion(
    model: nn.Module,
    method: Method,
    data: list[Batch],
    sgd: SGD | Adam | Sequence[SGD],
    *,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    version: Callable[[int, int], int] | None = None,
    plan: Plan | None = None,
    replicas: int = 1,
    loss_fn: Any = mse_loss,
    mean: Callable[[list[float]], float] | None = lambda losses: sum(losses) / len(losses),
    tolerance: float = 0.0,
    loss_tolerance: float = 1e-12,
    **options: Any,
) -> unlatch.Run:
    """Train `model`, whose every block is a stage, and compare with the recursion.

    **Arguments:**

    - `sgd`, `optimizer`: the optimizer written out, and its factory where that is not torch's of the same name.
    - `lr_scheduler`: a factory; what it does to the rates is for the recursion's `scale` to say.
    - `version`: of (stage, micro-batch): the version of its forward, where the method's lateness is not to be trusted.
    - `plan`: of tasks on devices; its layers are the stages.
    - `replicas`: that train it together; the recursion knows of none.
    - `mean`: the loss of a batch from those of its micro-batches; `None` not to compare losses.
    - `tolerance`, `loss_tolerance`: largest difference of a weight, absolute, and of a loss, relative.
    - `options`: of the recursion, before what the method's rules say.
    """
    blocks = chain(model)
    spans = [(k, k + 1) for k in range(len(blocks))] if plan is None else plan.spans
    stages = [StageChain(blocks[start:end]) for start, end in spans]
    m, rules = int(method.microbatches), method.rules()
    per_update = m * method.accumulate
    truth = recursion(
        copy.deepcopy(stages),
        [part for x, y in data for part in zip(x.tensor_split(m), y.tensor_split(m), strict=True)],
        loss_fn,
        sgd,
        version or behind(method.lateness(len(stages)), per_update),
        per_update=per_update,
        **{"backward": rules.backward.taken_at, "mixed": rules.mixes, **options},
    )
    if optimizer is None:
        assert isinstance(sgd, (SGD, Adam))
        optimizer = torch_optimizer(sgd)
    where = {} if plan is None else {"plan": plan, "stages": plan.devices}
    run = begin(model, method, optimizer, loss_fn, lr_scheduler=lr_scheduler, replicas=replicas, **where)
    losses = [result.loss for result in feed(run, data)]
    same_weights(stages, truth, tolerance)
    means = [mean(truth.losses[i : i + m]) for i in range(0, len(truth.losses), m)] if mean else losses
    assert losses == pytest.approx(means, rel=loss_tolerance, abs=0)
    return run


def same_weights(stages: Sequence[nn.Module], truth: Trajectory, tolerance: float) -> None:
    """Whether all weights are those at the end of a recursion."""
    for k, stage in enumerate(stages):
        for name, value in truth.weights[k][-1].items():
            difference = (stage.get_parameter(name) - value).abs().max().item()
            assert difference <= tolerance, (k, name, difference)
