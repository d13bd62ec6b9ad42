"""Builds the executors of methods with local losses."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from ..methods.border import BorderMethod
from ..methods.local import Local
from ..nn.chain import StageChain, cut
from ..runtime.border_worker import BorderWorker
from ..runtime.events import Recorder
from ..runtime.gradient_probe import GradientProbe
from ..runtime.local_engine import LocalEngine
from ..runtime.mail import Mail
from ..runtime.stage import Stage
from ..runtime.worker import Worker
from .build import Blueprint, builder_for
from .workshop import Workshop

__all__ = ["build_local"]


@builder_for(Local)
def build_local(blueprint: Blueprint, mail: Mail) -> LocalEngine:
    """The executor of this rank for a method with local losses."""
    method, starts = blueprint.method, blueprint.plan.starts
    assert isinstance(method, Local)
    parts, stages = cut(blueprint.blocks, starts), len(starts)
    rules = method.rules()
    local = {
        i: Stage(i, stages, StageChain(parts[i]), rules, blueprint.options)
        for i in blueprint.homes[blueprint.world.rank]
    }
    recorder, losses = Recorder(), dict[int, float]()
    shop = Workshop(blueprint, mail, recorder, losses)
    workers = {i: shop.worker(stage) for i, stage in local.items()}
    borders = isinstance(method, BorderMethod)
    return LocalEngine(
        local,
        method.schedule(stages),
        mail,
        workers,
        losses,
        lag=method.lag(stages),
        raw_data=borders,
        builds_data=isinstance(method, BorderMethod) and method.data == "build",
        layout=starts,
        before_update=_probing(method, local, workers, stages),
        recorder=recorder,
        microbatches=blueprint.parts,
        accumulate=method.accumulate,
        mean_loss=blueprint.mean_loss,
    )


def _probing(method: Local, local: dict[int, Stage], workers: dict[int, Worker], stages: int) -> Any:
    if not isinstance(method, BorderMethod) or not method.probe:
        return None
    if len(local) < stages:
        raise ConfigError(
            f"{method.name}: probe compares with backpropagation and needs the whole network in one process"
        )
    probe = GradientProbe(local, method.probe)
    ours = {i: w for i, w in workers.items() if isinstance(w, BorderWorker)}

    def before_update() -> None:
        probe({i: w.now.job for i, w in ours.items() if w.now is not None and w.now.job.micro.ends})

    before_update.probe = probe  # type: ignore[attr-defined]
    return before_update
