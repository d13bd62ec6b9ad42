"""Executors for LayerPipe: stages with late weight gradients, or tasks that the planner placed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..errors import PlanError
from ..methods import LayerPipe
from ..nn.chain import StageChain
from ..plan.task_plan import TaskPlan
from ..plan.task_routes import LayerKind, Routes
from ..rules.updates import StagePlace
from ..runtime.engine import Engine
from ..runtime.exchange import Exchange
from ..runtime.layer_away import GraphAway, LinearAway
from ..runtime.layer_home import GraphHome, Home, LinearHome, WholeHome
from ..runtime.layer_tasks import TaskEngine, TaskRecorder
from ..runtime.mail import Mail
from ..runtime.processor import Processor
from ..runtime.stage import Stage
from ..schedule import Kind
from ..schedule.slots import Offset, Slots
from .build import Blueprint, build_staged, builder_for
from .layer_plan import linear_of

__all__ = ["build_layerpipe", "message_peers"]


@builder_for(LayerPipe)
def build_layerpipe(blueprint: Blueprint, mail: Mail) -> Engine:
    """The executor of one rank."""
    method = blueprint.method
    assert isinstance(method, LayerPipe)
    if isinstance(blueprint.plan, TaskPlan):
        return _Shop(blueprint, blueprint.plan, method).engine(mail)
    if method.places_tasks:
        raise PlanError(f'layerpipe in mode "{method.mode}" needs a plan of tasks: leave plan out, or pass a TaskPlan')
    parts = blueprint.parts * method.accumulate
    # The moving average stands in for the weights of the input gradient, which is not late by g.
    reach = [math.ceil((gap - method.g) / parts) for gap in method.gaps(len(blueprint.plan.starts))]
    return build_staged(blueprint, mail, reach)


def message_peers(blueprint: Blueprint) -> dict[int, list[str]]:
    """Ranks that send tasks' messages to this one, or get some from it, with the kinds that only they send."""
    plan, method = blueprint.plan, blueprint.method
    if not isinstance(plan, TaskPlan) or not isinstance(method, LayerPipe):
        return {}
    ranks = {post: rank for rank, posts in enumerate(blueprint.homes) for post in posts}
    at = [ranks[plan.first_post(processor)] for processor in range(plan.processors)]
    own = blueprint.world.rank
    peers: dict[int, list[str]] = {}
    for name, sender, receiver in _Shop(blueprint, plan, method).routes.messages():
        if at[sender] != at[receiver] and own in (at[sender], at[receiver]):
            if at[receiver] == own:
                peers.setdefault(at[sender], []).append(name)
            else:
                peers.setdefault(at[receiver], [])
    return peers


class _Shop:
    """Makes homes, workers and processors from a plan of tasks."""

    def __init__(self, blueprint: Blueprint, plan: TaskPlan, method: LayerPipe) -> None:
        self.blueprint, self.plan, self.method = blueprint, plan, method
        spans, precision = plan.spans, blueprint.options.precision
        self.maps = [linear_of(blueprint.blocks, span, precision) for span in spans]
        kinds = [self._kind(layer) for layer in range(len(spans))]
        factors = [
            kind == "linear" and found is not None and found.function is not None
            for kind, found in zip(kinds, self.maps, strict=True)
        ]
        self.routes = Routes(plan.tasks, kinds, factors)
        self.posts = plan.posts
        self.addresses = [plan.first_post(processor) for processor in range(plan.processors)]

    def _kind(self, layer: int) -> LayerKind:
        if self.maps[layer] is not None:
            return "linear"
        if len({task.processor for task in self.plan.tasks if task.layer == layer}) == 1:
            return "whole"
        if any(task.kind == "D" and task.fraction != 1 for task in self.plan.tasks if task.layer == layer):
            raise PlanError(
                f"the input gradient of layer {layer} ({self.plan.blocks[self.plan.starts[layer]]}) is shared by rows, "
                "which only a linear map with an elementwise function allows: use mode='atomic'"
            )
        return "graph"

    def engine(self, mail: Mail) -> TaskEngine:
        """The executor of this rank, processors included."""
        blueprint = self.blueprint
        mine = blueprint.homes[blueprint.world.rank]
        stages: dict[int, Stage] = {post: self._stage(post) for post in mine}
        recorder = TaskRecorder()
        engine = TaskEngine(
            stages,
            Slots(len(self.posts), tuple(self._offsets())),
            mail,
            microbatches=blueprint.parts,
            accumulate=self.method.accumulate,
            mean_loss=blueprint.mean_loss,
            recorder=recorder,
        )
        numbers = [n for n, address in enumerate(self.addresses) if address in mine]
        engine.attach([self._processor(n, engine, stages, recorder) for n in numbers], self.routes.depth)
        return engine

    def _offsets(self) -> Iterable[Offset]:
        """The schedule for readers: shares of a D count once, when the last is done."""
        post_of = {layer: post for post, layer in enumerate(self.posts)}
        for layer, tasks in enumerate(self.routes.layers):
            yield Offset(Kind.F, post_of[layer], tasks.forward.slot)
        for layer, tasks in reversed(list(enumerate(self.routes.layers))):
            if tasks.input_gradient:
                yield Offset(Kind.I, post_of[layer], max(share.slot for share in tasks.input_gradient))
            yield Offset(Kind.W, post_of[layer], tasks.weight_gradient.slot)

    def _processor(
        self, number: int, engine: TaskEngine, stages: dict[int, Stage], recorder: TaskRecorder
    ) -> Processor:
        layers = self.routes.layers
        homes: dict[int, Home] = {}
        aways: dict[int, LinearAway | GraphAway] = {}
        for post, layer in enumerate(self.posts):
            if layer is None:
                continue
            stage = stages.get(post)
            if layers[layer].home == number:
                assert isinstance(stage, Home)
                homes[layer] = stage
            elif self._works_on(number, layer):
                aways[layer] = self._away(layer)
        exchange = Exchange(number, self.routes, self.addresses, engine.mail, engine.losses)
        face = stages[self.addresses[number]]
        return Processor(exchange, homes, aways, self.maps, face, engine.timed, recorder.stale, engine.losses)

    def _reach(self, layer: int) -> int:
        """Slots between the forward and the use of its weights in a gradient."""
        tasks = self.routes.layers[layer]
        used = [share.slot for share in tasks.input_gradient if share.processor == tasks.home]
        used += [courier.slot - 1 for courier in self.routes.couriers(layer)]
        if not used and tasks.kind != "linear":
            used = [tasks.weight_gradient.slot]
        return max(used, default=tasks.forward.slot) - tasks.forward.slot

    def _works_on(self, number: int, layer: int) -> bool:
        return any(task.processor == number for task in self.plan.tasks if task.layer == layer)

    def _away(self, layer: int) -> LinearAway | GraphAway:
        found = self.maps[layer]
        if found is not None:
            return LinearAway(found)
        return GraphAway(layer, self._module(layer), self.blueprint.options)

    def _module(self, layer: int) -> StageChain:
        start, end = self.plan.spans[layer]
        return StageChain(self.blueprint.blocks[start:end])

    def _stage(self, post: int) -> Stage:
        """A layer at its home, or the empty stage of a processor without one."""
        blueprint, rules, layer = self.blueprint, self.method.rules(), self.posts[post]
        if layer is None:
            return Stage(post, len(self.posts), StageChain([]), rules, blueprint.options)
        tasks = self.routes.layers[layer]
        couriers = self.routes.couriers(layer)
        parts = blueprint.parts * self.method.accumulate
        settings: dict[str, Any] = {
            "layer": layer,
            "last": layer == self.routes.last,
            "tasks": tasks,
            "couriers": len(couriers),
            "delay": math.ceil(self._reach(layer) / parts),
            "factor": rules.update.scale(StagePlace(tasks.home, self.plan.processors)),
        }
        module, found = self._module(layer), self.maps[layer]
        if tasks.kind == "linear":
            assert found is not None
            return LinearHome(post, len(self.posts), module, rules, blueprint.options, linear=found, **settings)
        form = WholeHome if tasks.kind == "whole" else GraphHome
        return form(post, len(self.posts), module, rules, blueprint.options, **settings)
