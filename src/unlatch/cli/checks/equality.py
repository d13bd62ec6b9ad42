"""Bit for bit: one stage against a plain PyTorch loop, and separate processes against one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from ...nn.chain import StageChain, chain
from ...nn.device import Device
from ...nn.randomness import replayable
from ...transport.lanes import check_transport
from ...transport.launch import Ranks
from ..prepare import updates_in
from .finding import Finding, Inapplicable
from .trial import Trial, largest_difference, relative_difference, train_on_rank

__all__ = ["one_stage", "plain_step", "two_processes"]

_ROUNDING = 1e-4


def one_stage(trial: Trial) -> Finding | str:
    """The method with a single stage does what a hand-written loop does."""
    method = replace(trial.method.joining(1), microbatches=1, accumulate=1)
    losses, state = trial.train(method=method, stages=1, plan=None, split="auto", distributed=False, **_lr(trial))
    expected_losses, expected = _plain_loop(trial)
    said = f"{trial.count} batches with {method.name} in one stage and in a plain PyTorch loop"
    return _compare("one stage", said, (losses, state), (expected_losses, expected), trial.device)


def two_processes(trial: Trial, ranks: Ranks, transport: str | None = None) -> Finding | str:
    """Two real processes do what one does. **Arguments:** `transport`: another one than the user's."""
    transport = transport or trial.config.run.transport
    check_transport(transport, trial.device.type)
    stages = trial.config.run.stages
    if stages < 2:
        raise Inapplicable("the model is in one stage, so there is nothing to share; try --stages 2")
    if trial.device.runs_ahead and torch.accelerator.device_count() < 2:
        raise Inapplicable("there is one device, and each process needs its own")
    here = trial.train(distributed=False)
    way = "" if transport == "auto" else f" over {transport}"
    said = f"{trial.count} batches with {trial.method.name} in {stages} stages, in one process and in two{way}"
    for losses, encoded in ranks.run(train_on_rank, trial, transport, timeout=300.0):
        found = _compare("two processes", said, (losses, load(encoded)), here, trial.device)
        if isinstance(found, Finding):
            return found
    return found


def _compare(
    check: str,
    said: str,
    one: tuple[list[float], dict[str, Tensor]],
    other: tuple[list[float], dict[str, Tensor]],
    device: Device,
) -> Finding | str:
    worst, where = largest_difference(one[1], other[1])
    if worst and device.runs_ahead:
        # Kernels of an accelerator need not add up in the same order twice.
        names = [name for name, t in one[1].items() if t.is_floating_point()]
        off = relative_difference([one[1][name] for name in names], [other[1][name] for name in names])
        if off <= _ROUNDING:
            return f"{said}: the same weights and buffers up to rounding ({off:.1e})"
    if worst:
        return Finding(check, "differs", f"{said}: '{where}' differs by {worst:.3g}")
    if one[0] != other[0]:
        return Finding(check, "differs", f"{said}: the same weights, but losses {one[0]} and {other[0]}")
    return f"{said}: the same weights, buffers and losses, bit for bit"


def _lr(trial: Trial) -> dict[str, Any]:
    return {"lr_scheduler": trial.config.lr_factory(updates_in(trial.count, 1, 1))}


def _plain_loop(trial: Trial) -> tuple[list[float], dict[str, Tensor]]:
    model = trial.device.moved(trial.model())
    step, losses = plain_step(trial, model), []
    for number, batch in enumerate(trial.batches()):
        losses.append(step(number, batch))
    return losses, {name: t.detach().cpu() for name, t in model.state_dict().items()}


def plain_step(trial: Trial, model: nn.Module | None = None) -> Callable[[int, tuple[Tensor, Tensor]], float]:
    """Training as a hand-written loop does it: of a number and a batch, the loss."""
    config, device = trial.config, trial.device
    model = device.moved(model if model is not None else trial.model())
    # In the order of the chain: clipping adds up norms, and sums depend on their order.
    params = [p for p in StageChain(chain(model)).parameters() if p.requires_grad]
    optimizer = config.optimizer_factory()(params)
    scheduler = _lr(trial)["lr_scheduler"](optimizer)
    loss_fn = config.loss_fn()

    def step(number: int, batch: tuple[Tensor, Tensor]) -> float:
        x, y = device.here(batch)
        with replayable(config.run.seed, 0, number, device), device.autocast(config.run.precision):
            loss = loss_fn(model(x), y)
        value = float(loss.detach())
        loss.backward()
        if config.run.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(params, config.run.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return value

    return step
