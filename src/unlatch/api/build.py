"""From a blueprint to an executor. Methods that are more than a schedule of stages bring a builder of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..methods import Method
from ..nn.chain import Block, Model, StageChain, cut
from ..nn.tree import Tree
from ..plan import Plan
from ..runtime.engine import Engine
from ..runtime.mail import Mail
from ..runtime.stage import Stage, StageOptions
from ..runtime.world import World

__all__ = ["Blueprint", "build_engine", "build_staged", "builder_for"]


@dataclass(frozen=True)
class Blueprint:
    """Everything an executor is built from, the same on every rank but for `world`.

    **Arguments:** `homes`: the stages of each rank; `sample`: one batch, if the user gave one.
    """

    model: Model
    method: Method
    blocks: Sequence[Block]
    plan: Plan
    options: StageOptions
    homes: Sequence[range]
    world: World
    mean_loss: bool
    sample: tuple[Tree, Tree] | None

    @property
    def parts(self) -> int:
        """Micro-batches per batch."""
        return self.method.microbatches if self.method.microbatches != "auto" else 1


#: Takes the blueprint and the mail of this rank; returns what `Run` drives: an `Engine`, or what acts like one.
Builder = Callable[[Blueprint, Mail], Any]
BUILDERS: dict[type[Method], Builder] = {}
B = TypeVar("B", bound=Builder)


def builder_for(method: type[Method]) -> Callable[[B], B]:
    """Decorator: build executors for this class of methods with the decorated function."""

    def register(build: B) -> B:
        BUILDERS[method] = build
        return build

    return register


def build_engine(blueprint: Blueprint, mail: Mail) -> Engine:
    """The executor of this rank."""
    for kind in type(blueprint.method).__mro__:
        if kind in BUILDERS:
            engine: Engine = BUILDERS[kind](blueprint, mail)
            return engine
    return build_staged(blueprint, mail)


def build_staged(blueprint: Blueprint, mail: Mail, crossed: Sequence[int] | None = None) -> Engine:
    """The common case: stages that follow the method's schedule under its rules.

    **Arguments:** `crossed`: per stage, updates between the forward and the input gradient, if not the staleness.
    """
    method, starts = blueprint.method, blueprint.plan.starts
    stages, rules = len(starts), method.rules()
    modules = [StageChain(part) for part in cut(blueprint.blocks, starts)]
    if crossed is None:
        crossed = [math.ceil(updates) for updates in method.staleness(stages)]
    local = {
        i: Stage(
            i,
            stages,
            modules[i],
            rules,
            blueprint.options,
            delay=crossed[i],
            hands_down_input=i > 0 and rules.activation.at(i - 1, stages, modules[i - 1]).inverts,
        )
        for i in blueprint.homes[blueprint.world.rank]
    }
    return Engine(
        local,
        method.schedule(stages),
        mail,
        microbatches=blueprint.parts,
        accumulate=method.accumulate,
        mean_loss=blueprint.mean_loss,
    )
