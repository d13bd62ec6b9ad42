"""From a model and a method to a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import torch

from ..errors import ConfigError
from ..methods import Method
from ..methods import get as get_method
from ..metrics import Metric, checked
from ..nn.chain import Block, Model, as_module, chain, cut
from ..nn.chain_check import check_chain, check_own_loss
from ..nn.device import check_on_host, find_device
from ..nn.foreign import Foreign, foreign
from ..nn.parts import in_parts
from ..nn.tree import Tree, batch_size
from ..plan import Plan
from ..rules.losses import LossFunction
from ..rules.updates import OptimizerFactory, PerEpoch
from ..runtime.blueprint import Blueprint
from ..runtime.stage import StageOptions
from ..runtime.updating import Optimizer
from ..transport.faults import Faults
from ..transport.lanes import check_transport
from ..transport.rounding import Format, check_format
from ..transport.world import World, current_world
from .compile_options import read_compile
from .handshake import shake_hands
from .replication import check_replication, ranks_per_replica
from .reversal import check_reversal
from .rounding_options import rounding_note
from .run import Run
from .update_options import check_clipping, check_factories
from .wiring import connect, place

__all__ = ["parallelize"]

log = logging.getLogger("unlatch")


def parallelize(
    model: Model,
    method: str | Method = "bp",
    *,
    stages: int,
    loss_fn: LossFunction | None = None,
    optimizer: OptimizerFactory,
    lr_scheduler: Callable[[Optimizer], Any] | None = None,
    lr_scheduler_per: Literal["update", "epoch"] = "update",
    split: Literal["auto"] | Sequence[str] = "auto",
    sample: tuple[Tree, Tree] | Mapping[str, Any] | None = None,
    plan: Plan | None = None,
    replicas: int = 1,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
    device: str | torch.device = "auto",
    clip_grad_norm: float | None = None,
    clip_norm_of: Literal["stage", "model"] = "stage",
    loss_reduction: Literal["mean", "sum"] = "mean",
    metrics: Sequence[Metric] | None = None,
    seed: int = 0,
    nonfinite: Literal["stop", "skip", "ignore"] = "stop",
    messages: Format = "exact",
    compile: bool | str | Mapping[str, Any] = False,
    stall_limit: float = 60.0,
    distributed: bool | None = None,
    transport: Literal["auto", "gloo", "nccl"] = "auto",
    faults: Faults | None = None,
) -> Run:
    """Cut a model into stages and train it with a method that does not wait for the whole network.

    Called alike on every rank. Without a process group everything runs inline, in this process, with the same result.

    **Arguments:**

    - `model`: `nn.Sequential`, a list of blocks, a module with `blocks()`, or a model of `transformers` as it is. Same
      seed, same model, on every rank.
    - `method`: a name or an object from `unlatch.methods`.
    - `stages`: parts the model is cut into; at least as many as there are processes for each replica.
    - `loss_fn`: of output and target; without it a model of `transformers` is trained with its own loss.
    - `optimizer`: a factory, called once per stage with the parameters of that stage. In an argument called `named` it
      gets them with their names in the model, in one called `stage` a `unlatch.rules.updates.StagePlace`: `index`,
      `count`, `delay` in updates, `names`. `unlatch.optim` has some ready.
    - `lr_scheduler`: a factory as well, of the stage's optimizer.
    - `lr_scheduler_per`: when schedulers step: after every `"update"` of their stage, or at the end of every `"epoch"`,
      which a `Trainer` tells them, or `run.end_epoch(metric)` in a loop of your own.
    - `split`: `"auto"` balances measured costs of this method; or the names of the blocks that start the second and
      later stages.
    - `sample`: one batch `(x, y)`, used to measure, to check the chain, and to decide `microbatches="auto"`. Without it
      the chain is checked on the first batch.
    - `plan`: a finished plan instead of `split`.
    - `replicas`: so many copies of the network, each on `ranks / replicas` ranks of its own, are trained on shares of
      the rows of every batch; gradients are summed at every update, so that all copies stay alike.
    - `precision`: `"bf16"` and `"fp16"` run forwards under autocast; the latter with a scaled loss, which chains of
      stages know.
    - `device`: where stages compute. `"auto"` takes an accelerator if torch finds one and the CPU otherwise; `"cpu"`;
      `"cuda"` or another kind, of which each rank takes its own by `LOCAL_RANK`; or one device, such as `"cuda:1"`.
      The model stays on the CPU: each rank moves copies of its own stages, and `run.module()` brings the weights back.
    - `clip_grad_norm`: limits the norm of the gradient.
    - `clip_norm_of`: `"stage"` limits each stage by itself; `"model"` all together, as torch does, which only methods
      can that update all stages at the same time.
    - `loss_reduction`: `"mean"` weights micro-batches by their size; `"sum"` adds them.
    - `metrics`: what evaluations measure beside the loss, see `unlatch.metrics`; by default accuracy, for classifiers,
      and what fits a model of `transformers` with its own loss.
    - `seed`: dropout masks are a function of (seed, stage, micro-batch).
    - `nonfinite`: what happens when a loss, gradient or weight becomes NaN or infinite, always before it is applied.
      `"stop"` ends the run on all ranks with `NonFinite`, after a checkpoint of the last good state if a `Trainer` has
      a folder for it. `"skip"` goes back to the last good state, which is kept in memory, and on without the batch at
      fault, as if it had never been fed. `"ignore"` does not look.
    - `messages`: how states and gradients travel between stages. `"bf16"` takes half of the bytes, `"int8"` a quarter,
      for slow links. Both change results, inline and on ranks alike; evaluations are exact.
    - `compile`: whether stages run as code of `torch.compile`: `True`, the name of a backend, or a dict of `backend`,
      `mode`, `options`, `fullgraph`, `dynamic`. Results are those without it within rounding.
    - `stall_limit`: seconds without a sign of life after which a rank counts as stuck.
    - `distributed`: `False` runs inline even inside a process group.
    - `transport`: how messages travel between ranks. `"auto"`: between ranks of one machine through memory that both
      see, otherwise by gloo; `"gloo"`: by gloo everywhere; `"nccl"`: tensors from one cuda device to the next by NCCL
      (which nobody has run yet, see docs/devices.md), the rest by gloo. Results are the same.
    - `faults`: what is to go wrong on purpose (`unlatch.Faults`); by default what `UNLATCH_FAULTS` says.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> run = parallelize(model, "dtr", stages=2, loss_fn=nn.functional.cross_entropy,
    ...                   optimizer=lambda params: torch.optim.SGD(params, lr=0.1), split=["2"])
    >>> x, y = torch.randn(8, 4), torch.randint(2, (8,))
    >>> [run.step(x, y).batch for _ in range(4)]
    [None, None, 0, 1]
    """
    _check_arguments(stages, precision, loss_reduction, clip_grad_norm, nonfinite)
    check_factories(optimizer, lr_scheduler, lr_scheduler_per)
    check_format(messages)
    if isinstance(loss_fn, type):
        raise ConfigError(f"loss_fn is the class {loss_fn.__name__}, which makes losses: pass {loss_fn.__name__}()")
    elsewhere, own_loss = foreign(model), loss_fn is None
    loss = _own_loss(elsewhere, model) if loss_fn is None else loss_fn
    batch = _taken_apart(elsewhere, sample, own_loss)
    check_on_host(as_module(model))
    world = current_world(distributed, stall_limit)
    with world.telling_of_errors():
        place_here = find_device(device, ranks=world.size)
        compilation = read_compile(compile, place_here.type)
        check_transport(transport, place_here.type)
        # The model is on the CPU, and so is everything that is found out with it before training.
        batch = place_here.on_host(batch)
        chosen = get_method(method).resolve(stages, batch_size(batch[0]) if batch is not None else None)
        per_replica = ranks_per_replica(replicas, world.size, chosen, batch)
        check_clipping(chosen, stages, clip_grad_norm, clip_norm_of)
        asked = {
            "stages": stages,
            "replicas": replicas,
            "split": split if isinstance(split, str) else list(split),
            "plan": plan.starts if plan is not None else None,
            "seed": seed,
            "precision": precision,
            "device": place_here.type,
            "clip_grad_norm": clip_grad_norm,
            "clip_norm_of": clip_norm_of,
            "lr_scheduler_per": lr_scheduler_per,
            "loss_reduction": loss_reduction,
            "nonfinite": nonfinite,
            "messages": messages,
            "compile": asdict(compilation) if compilation is not None else False,
            "transport": transport,
        }
        shake_hands(world, chosen, asked, model)
        blocks = chain(model)
        if plan is None:
            # Only rank 0 measures: two measurements never agree, and all ranks must cut alike.
            found = chosen.plan(blocks, stages, split, batch, precision) if world.rank == 0 else None
            plan = world.broadcast(found)
            assert plan is not None
        chosen.check_plan(plan, stages)
        check_replication(plan, replicas)
        chosen = chosen.follow(plan)
        blocks = in_parts(blocks, plan.split or ())
        x = batch[0] if batch is not None else None
        check_chain(blocks, model, plan.starts, x)
        if batch is not None and own_loss:
            check_own_loss(as_module(model), *batch)
        stored = check_reversal(blocks, plan.starts, chosen.rules(), x)
        chosen, tuned = _tune(chosen, blocks, plan, batch, loss, world)
        options = StageOptions(
            loss_fn=loss,
            optimizer=optimizer,
            lr_scheduler=PerEpoch(lr_scheduler) if lr_scheduler and lr_scheduler_per == "epoch" else lr_scheduler,
            lr_scale=chosen.lr_scale if chosen.scales_lr else None,
            clip_grad_norm=clip_grad_norm,
            clip_norm_of=clip_norm_of,
            precision=precision,
            seed=seed,
            nonfinite=nonfinite,
            device=place_here,
            compilation=compilation,
        )
        held_by_rank = place(stages, per_replica, [float(load) for load in plan.loads[:: plan.replication]])
        blueprint = Blueprint(
            model=model,
            blocks=blocks,
            plan=plan,
            options=options,
            ranks=[rank for rank, held in enumerate(held_by_rank) for _ in held],
            world=world,
            microbatches=chosen.microbatches if chosen.microbatches != "auto" else 1,
            accumulate=chosen.accumulate,
            mean_loss=loss_reduction == "mean",
            sample=batch,
            own_loss=own_loss,
            transport=transport,
            messages=messages,
            replicas=replicas,
        )
        rounded = rounding_note(blueprint, chosen)
        run = connect(blueprint, chosen, faults if faults is not None else Faults.from_environment())
        if elsewhere is not None and own_loss:
            run.known_metrics = tuple(elsewhere.metrics or ())
        run.metrics = checked(metrics if metrics is not None else run.known_metrics or None)
        run.notes += [n for n in (plan.note, tuned, stored, rounded) if n]
        run.notes += chosen.notes(run.method_statistics())
        if world.rank == 0:
            for warning in (stored, rounded, run.advice.warning):
                if warning is not None:
                    log.warning("%s", warning)
        return run


def _check_arguments(stages: int, precision: str, reduction: str, clip: float | None, nonfinite: str) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError(f"stages must be a whole number, at least 1, got {stages!r}")
    if precision not in ("fp32", "bf16", "fp16"):
        raise ConfigError(f'precision must be "fp32", "bf16" or "fp16", got {precision!r}')
    if reduction not in ("mean", "sum"):
        raise ConfigError(f'loss_reduction must be "mean" or "sum", got {reduction!r}')
    if clip is not None and clip <= 0:
        raise ConfigError(f"clip_grad_norm must be positive, got {clip!r}")
    if nonfinite not in ("stop", "skip", "ignore"):
        raise ConfigError(f'nonfinite must be "stop", "skip" or "ignore", got {nonfinite!r}')


def _own_loss(elsewhere: Foreign | None, model: Model) -> LossFunction:
    if elsewhere is None:
        raise ConfigError("loss_fn is missing: pass a function of output and target, such as F.cross_entropy")
    loss: LossFunction | None = elsewhere.loss
    if loss is None:
        # A model that cannot be cut at all says so here.
        elsewhere.blocks()
        raise ConfigError(
            f"{type(model).__name__} has no loss that is known here: pass loss_fn, a function of output and labels, or "
            "take a class with a head for causal or masked language modelling or for classification"
        )
    return loss


def _taken_apart(elsewhere: Foreign | None, sample: Any, own_loss: bool) -> tuple[Tree, Tree] | None:
    """The sample as `(x, y)`."""
    if sample is None:
        return None
    if elsewhere is not None and isinstance(sample, Mapping):
        return elsewhere.taken_apart(sample, own_loss=own_loss)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ConfigError(f"sample must be one batch (x, y), got {type(sample).__name__}")
    x, y = sample
    return elsewhere.taken_apart((x, y), own_loss=own_loss) if elsewhere is not None else (x, y)


def _tune(
    method: Method, blocks: list[Block], plan: Plan, sample: Any, loss_fn: Any, world: World
) -> tuple[Method, str | None]:
    """What a method decides by measuring, decided by one rank for all."""
    found = method.tune(cut(blocks, plan.starts), sample, loss_fn) if world.rank == 0 else None
    options, why = world.broadcast(found) or ({}, "")
    if not options:
        return method, None
    log.info("%s", why)
    return replace(method, **options), why
