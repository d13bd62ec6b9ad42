"""From a model and a method to a run."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError, PlanError
from ..methods import DTRP, AuxNet, LayerPipe, Method
from ..methods import get as get_method
from ..nn.chain import Block, Model, as_module, chain, cut
from ..nn.chain_check import check_chain, ties
from ..nn.tree import Tree, batch_size
from ..plan import Plan, make_plan, profile
from ..plan.auxnet_partition import auxnet_split
from ..rules.updates import OptimizerFactory
from ..runtime.health import Health
from ..runtime.jobs import SENT_DOWN, SENT_UP
from ..runtime.mail import ACK, BACKWARD, EVALUATE, FORWARD, Mail, Message
from ..runtime.stage import StageOptions
from ..runtime.transport import Link
from ..runtime.updating import Optimizer
from ..runtime.world import World, current_world
from .batching import Compensation
from .build import Blueprint, build_engine
from .compensation import choose_compensation
from .layer_plan import plan_layers, rank_stages, with_delays
from .layerpipe import message_peers
from .reversal import check_reversal
from .run import Run

__all__ = ["parallelize"]

log = logging.getLogger("unlatch")


def parallelize(
    model: Model,
    method: str | Method = "bp",
    *,
    stages: int,
    loss_fn: Callable[[Any, Any], Tensor],
    optimizer: OptimizerFactory,
    lr_scheduler: Callable[[Optimizer], Any] | None = None,
    split: Literal["auto"] | Sequence[str] = "auto",
    sample: tuple[Tree, Tree] | None = None,
    plan: Plan | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    clip_grad_norm: float | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    seed: int = 0,
    stall_limit: float = 60.0,
    distributed: bool | None = None,
) -> Run:
    """Cut a model into stages and train it with a method that does not wait for the whole network.

    Called alike on every rank. Without a process group everything runs inline, in this process, with the same result.

    **Arguments:**

    - `model`: `nn.Sequential`, a list of blocks, or a module with `blocks()`. Same seed, same model, on every rank.
    - `method`: a name or an object from `unlatch.methods`.
    - `stages`: parts the model is cut into; at least as many as there are processes.
    - `loss_fn`: of output and target.
    - `optimizer`, `lr_scheduler`: factories, called once per stage. The scheduler steps once per update. An optimizer
      factory is given the stage's parameters and, if it has a second argument (one without default, or one called
      `stage`), a `unlatch.rules.updates.StagePlace`: `index`, `count`, `delay` in updates, `names` of the parameters.
    - `split`: `"auto"` balances measured costs of this method; or the names of the blocks that start the second and
      later stages.
    - `sample`: one batch `(x, y)`, used to measure, to check the chain, and to decide `microbatches="auto"`.
    - `plan`: a finished plan instead of `split`.
    - `precision`: `"bf16"` runs forwards under autocast.
    - `clip_grad_norm`: limits the gradient norm of each stage by itself.
    - `loss_reduction`: `"mean"` weights micro-batches by their size; `"sum"` adds them.
    - `seed`: dropout masks are a function of (seed, stage, micro-batch).
    - `stall_limit`: seconds without a sign of life after which a rank counts as stuck.
    - `distributed`: `False` runs inline even inside a process group.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> run = parallelize(model, "dtr", stages=2, loss_fn=nn.functional.cross_entropy,
    ...                   optimizer=lambda params: torch.optim.SGD(params, lr=0.1), split=["2"])
    >>> x, y = torch.randn(8, 4), torch.randint(2, (8,))
    >>> [run.step(x, y).batch for _ in range(4)]
    [None, None, 0, 1]
    """
    _check_arguments(stages, precision, loss_reduction, clip_grad_norm, sample, optimizer)
    world = current_world(distributed)
    chosen = get_method(method).resolve(stages, batch_size(sample[0]) if sample is not None else None)
    chosen.schedule(stages)
    asked = {
        "stages": stages,
        "split": split if isinstance(split, str) else list(split),
        "plan": plan.starts if plan is not None else None,
        "seed": seed,
        "precision": precision,
        "clip_grad_norm": clip_grad_norm,
        "loss_reduction": loss_reduction,
    }
    _handshake(world, chosen, asked, model)
    blocks = chain(model)
    if plan is None:
        plan = _plan(blocks, chosen, stages, split, sample, precision, world)
    elif len(plan.starts) != stages and not (isinstance(chosen, LayerPipe) and chosen.places_tasks):
        raise PlanError(f"the plan has {len(plan.starts)} stages, but stages={stages} was asked for")
    chosen = with_delays(chosen, plan)
    check_chain(blocks, model, plan.starts, sample[0] if sample is not None else None)
    stored = check_reversal(blocks, plan.starts, chosen.rules(), sample[0] if sample is not None else None)
    chosen, note = _decide_compensation(chosen, blocks, plan, sample, loss_fn, world)
    options = StageOptions(
        loss_fn=loss_fn,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        lr_scale=chosen.lr_scale if isinstance(chosen, DTRP) and chosen.compensate_lr != "none" else None,
        clip_grad_norm=clip_grad_norm,
        precision=precision,
        seed=seed,
    )
    homes = rank_stages(plan, stages, world.size)
    mean_loss = loss_reduction == "mean"
    run = _connect(Blueprint(model, chosen, blocks, plan, options, homes, world, mean_loss, sample), stall_limit)
    run.notes += [n for n in (plan.note, note, stored) if n]
    if isinstance(chosen, AuxNet):
        sizes = [(part.stage, part.capacity) for part in run.method_statistics()]
        run.notes += [f"the AuxNet of stage {stage} has {size}" for stage, size in sizes if size is not None]
    if run.advice is not None and run.advice.warning is not None and world.rank == 0:
        log.warning("%s", run.advice.warning)
    return run


def _check_arguments(
    stages: int,
    precision: str,
    reduction: str,
    clip: float | None,
    sample: tuple[Tree, Tree] | None,
    optimizer: Any,
) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise ConfigError(f"stages must be a whole number, at least 1, got {stages!r}")
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f'precision must be "fp32" or "bf16", got {precision!r}')
    if reduction not in ("mean", "sum"):
        raise ConfigError(f'loss_reduction must be "mean" or "sum", got {reduction!r}')
    if clip is not None and clip <= 0:
        raise ConfigError(f"clip_grad_norm must be positive, got {clip!r}")
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer must be a function from parameters to an optimizer, called once per stage, got "
            f"{type(optimizer).__name__}: pass functools.partial({type(optimizer).__name__}, lr=...)"
        )
    if sample is not None and not (isinstance(sample, tuple | list) and len(sample) == 2):
        raise ConfigError(f"sample must be one batch (x, y), got {type(sample).__name__}")


def _plan(
    blocks: list[Block],
    method: Method,
    stages: int,
    split: Literal["auto"] | Sequence[str],
    sample: tuple[Tree, Tree] | None,
    precision: Literal["fp32", "bf16"],
    world: World,
) -> Plan:
    """Only rank 0 measures: two measurements never agree, and all ranks must cut alike."""
    if isinstance(method, LayerPipe) and method.places_tasks:
        found = plan_layers(blocks, method, stages, split, sample, precision) if world.rank == 0 else None
        return world.broadcast(found)  # type: ignore[return-value]
    costs = None
    if world.rank == 0 and split == "auto" and sample is not None and 1 < stages < len(blocks):
        costs = profile(blocks, sample[0], precision=precision)
        if isinstance(method, AuxNet) and not ties(blocks):
            # A stage pays for the network that predicts its input as well.
            split = auxnet_split(blocks, sample[0], stages, method.depth, costs)
    return world.broadcast(make_plan(blocks, stages, costs=costs, recompute=method.recomputes, split=split))


def _decide_compensation(
    method: Method, blocks: list[Block], plan: Plan, sample: Any, loss_fn: Any, world: World
) -> tuple[Method, str | None]:
    if not isinstance(method, DTRP) or method.compensate != "auto":
        return method, None
    if sample is None:
        raise ConfigError('compensate="auto" measures batches of several sizes: pass sample=(x, y)')
    found = choose_compensation(cut(blocks, plan.starts), sample, loss_fn) if world.rank == 0 else None
    count, why = world.broadcast(found) or (1, "")
    log.info("%s", why)
    return replace(method, compensate=count), why


def _handshake(world: World, method: Method, asked: dict[str, Any], model: Model) -> None:
    """All ranks must mean the same run; the difference is named before anything is done together."""
    if world.group is None:
        return
    # Functions in a method are shown with their address, which is another one in each process.
    named = re.sub(r" at 0x[0-9a-f]+", "", repr(method))
    facts = {**asked, "method": named, "torch": torch.__version__, "initial weights": _fingerprint(model)}
    for rank, others in enumerate(world.gather(facts)):
        for what, mine in facts.items():
            if others[what] != mine:
                raise ConfigError(
                    f"ranks {world.rank} and {rank} disagree on {what}: {mine} here, {others[what]} there. Run the "
                    "same program everywhere and build the model from one seed (torch.manual_seed) on every rank."
                )


def _fingerprint(model: Model) -> str:
    digest = hashlib.sha256()
    for name, t in as_module(model).state_dict().items():
        digest.update(name.encode())
        if isinstance(t, Tensor):
            digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _connect(blueprint: Blueprint, stall_limit: float) -> Run:
    """Build the executor of this rank and its links to the neighbours."""
    method, world, homes = blueprint.method, blueprint.world, blueprint.homes
    mine = homes[world.rank]
    links: dict[int, Link] = {}
    rank_of = {stage: rank for rank, stages in enumerate(homes) for stage in stages}

    def forward_to(message: Message) -> None:
        links[rank_of[message.stage]].send(message)

    # Each forward under way is paid back by a backward; evaluation has at most one batch per rank under way.
    credits = max(method.schedule(len(blueprint.plan.starts)).delay(0) + 1, blueprint.parts, world.size) + 1
    mail = Mail(mine, credits, forward_to)
    engine = build_engine(blueprint, mail)
    health = None
    if world.group is not None:
        health = Health(world.name, world.rank, world.size, lambda r: _describe(homes[r]), mail.fail, stall_limit)
        tasks = message_peers(blueprint)
        for peer in range(world.size):
            kinds = (*_sent_by(peer, world.rank), *tasks.get(peer, ()))
            if abs(peer - world.rank) == 1 or peer in tasks:
                links[peer] = Link(peer, world.group, mail, health, kinds)
    compensation = Compensation(method.compensate if isinstance(method, DTRP) and method.compensate != "auto" else 1)
    options, plan = blueprint.options, blueprint.plan
    return Run(blueprint.model, method, plan, options, engine, world, list(links.values()), health, compensation)


def _sent_by(peer: int, rank: int) -> tuple[str, ...]:
    """Kinds of messages that only this neighbour sends."""
    if abs(peer - rank) > 1:
        return ()
    return (FORWARD, EVALUATE, *SENT_UP) if peer < rank else (BACKWARD, ACK, *SENT_DOWN)


def _describe(stages: range) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
