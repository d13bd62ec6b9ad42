"""How good are a method's gradients? Compared, at chosen updates, with exact backpropagation on the same samples.

There are two natural yardsticks, and delay separates them: the gradient at the weights that each stage showed to the
forward of each micro-batch, and the gradient at the weights that the update is applied to, which are those of version n
at every stage for the n-th update. Methods that keep graphs give the former exactly; none gives the latter, except
without delay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..nn.randomness import replayable
from ..nn.statistics import frozen_statistics
from ..nn.tree import Tree, map_tensors
from ..rules.losses import taken_apart
from ..rules.weights import weights_at
from ..runtime.engine import Engine
from ..runtime.stage import Stage
from ..runtime.station import ChainStation
from ..transport.mail import Micro

__all__ = ["Comparison", "GradientProbe", "as_metrics"]

Reference = Literal["forward", "current"]
Gradient = list[Tensor]


@dataclass(frozen=True)
class Comparison:
    """One stage's gradient g at one update beside an exact one r.

    **Arguments:**

    - `update`: number of the update, from 0.
    - `reference`: the weights that r was computed at: those of the `"forward"` or the `"current"` ones.
    - `cosine`: of the angle between g and r.
    - `norm_ratio`: `|g| / |r|`.
    - `relative_error`: `|g - r| / |r|`.
    """

    update: int
    stage: int
    reference: Reference
    cosine: float
    norm_ratio: float
    relative_error: float


def as_metrics(found: Sequence[Comparison]) -> dict[str, float]:
    """The numbers of one update under names for a logger.

    >>> list(as_metrics([Comparison(0, 2, "forward", 1.0, 1.0, 0.0)]))[:2]
    ['probe/update', 'probe/stage2/forward/cosine']
    """
    numbers: dict[str, float] = {"probe/update": found[0].update} if found else {}
    return numbers | {
        f"probe/stage{c.stage}/{c.reference}/{name}": getattr(c, name)
        for c in found
        for name in ("cosine", "norm_ratio", "relative_error")
    }


@dataclass
class _Seen:
    """What is collected about one update until its last stage has made it."""

    micros: dict[int, Micro] = field(default_factory=dict)
    inputs: dict[int, Tree] = field(default_factory=dict)
    targets: dict[int, Tree] = field(default_factory=dict)
    forward: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    current: dict[int, list[Tensor]] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    divisor: float = 1.0


class GradientProbe:
    """Watches all stages of a network; made by `Run.probe_gradients`. Training is not changed by it.

    **Arguments:**

    - `engine`: holds all stages of the network.
    - `at`: numbers of the updates to look at, or
    - `every`: look at every so many updates, from the first on.
    - `on_found`: called with the comparisons of each update.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        at: Collection[int] | None = None,
        every: int | None = None,
        on_found: Callable[[list[Comparison]], None] | None = None,
    ) -> None:
        if (at is None) == (every is None) or (every is not None and every < 1):
            raise ConfigError(f"a gradient probe needs at=[updates] or every=updates (1 or more), got {at=}, {every=}")
        _check_engine(engine)
        self.found: list[Comparison] = []
        self._stages = [engine.stages[index] for index in sorted(engine.stages)]
        self._first = engine.next_update
        self._at = None if at is None else frozenset(at)
        self._every = every
        self._on_found = on_found
        self._seen: dict[int, _Seen] = {}
        for stage in self._stages:
            stage.observer = self

    def _wanted(self, update: int) -> bool:
        if update < self._first:
            return False
        return update in self._at if self._at is not None else update % (self._every or 1) == 0

    def forward(self, stage: Stage, micro: Micro, inputs: Tree, target: Tree) -> None:
        """Take note of the weights that a forward sees, and of its samples."""
        if not self._wanted(micro.update):
            return
        seen = self._seen.setdefault(micro.update, _Seen())
        seen.micros[micro.id] = micro
        seen.forward[stage.index, micro.id] = _copies(stage)
        if stage.first:
            seen.inputs[micro.id] = map_tensors(Tensor.clone, inputs)
        if stage.last:
            seen.targets[micro.id] = map_tensors(Tensor.clone, target)

    def update(self, stage: Stage, divisor: float) -> None:
        """Take note of a stage's gradient and of the weights it is applied to; after the last stage, compare."""
        seen = self._seen.get(stage.version)
        if seen is None:
            return
        seen.divisor = divisor
        seen.gradients[stage.index] = [_grad(p) / divisor for p in stage.params]
        seen.current[stage.index] = _copies(stage)
        if len(seen.gradients) == len(self._stages):
            self._compare(stage.version, self._seen.pop(stage.version))

    def _compare(self, update: int, seen: _Seen) -> None:
        exact: dict[Reference, list[Gradient]] = {
            "forward": self._exact(seen, lambda s, m: seen.forward[s, m]),
            "current": self._exact(seen, lambda s, _: seen.current[s]),
        }
        found = [
            Comparison(update, stage.index, reference, *_distance(seen.gradients[stage.index], gradient))
            for reference, gradients in exact.items()
            for stage, gradient in zip(self._stages, gradients, strict=True)
            if stage.params
        ]
        self.found += found
        if self._on_found is not None:
            self._on_found(found)

    def _exact(self, seen: _Seen, weights: Callable[[int, int], list[Tensor]]) -> list[Gradient]:
        """Backpropagation through the whole network, summed over micro-batches as the method does."""
        total = [[torch.zeros_like(p) for p in stage.params] for stage in self._stages]
        for number, micro in seen.micros.items():
            with ExitStack() as stack:
                for stage in self._stages:
                    stack.enter_context(weights_at(stage.params, weights(stage.index, number)))
                found = self._backpropagate(micro, seen.inputs[number], seen.targets[number])
            for sums, gradient in zip(total, found, strict=True):
                for t, g in zip(sums, gradient, strict=True):
                    t += g / seen.divisor
        return total

    @torch.enable_grad()
    def _backpropagate(self, micro: Micro, x: Any, target: Tree) -> list[Gradient]:
        options = self._stages[0].options
        bf16 = torch.autocast("cpu", torch.bfloat16, options.precision == "bf16")
        for stage in self._stages:
            with replayable(options.draws, stage.index, micro.id), frozen_statistics(stage.module), bf16:
                x = stage.module(x)
                if stage.last:
                    loss, count = taken_apart(options.loss_fn(x, target))
                    x = loss * micro.scale if count is None else loss
        wanted = [p for stage in self._stages for p in stage.params]
        found = iter(torch.autograd.grad(x, wanted, allow_unused=True, materialize_grads=True) if wanted else ())
        return [[next(found) for _ in stage.params] for stage in self._stages]


def _check_engine(engine: Engine) -> None:
    if engine.columns.count > 1:
        raise ConfigError(
            f"a gradient probe compares with backpropagation through one network, and {engine.columns.count} replicas "
            "are trained: run it with replicas=1, which sees whole batches"
        )
    if len(engine.stages) < engine.schedule.stages:
        raise ConfigError(
            "a gradient probe compares with backpropagation through the whole network, of which this process holds "
            f"stages {min(engine.stages)} to {max(engine.stages)} of {engine.schedule.stages}: run inline, in one "
            "process or with distributed=False; the weights are the same, bit for bit"
        )
    if not all(isinstance(station, ChainStation) for station in engine.stations.values()):
        raise ConfigError(
            "a gradient probe needs stages with one loss at the end and whole backwards: for methods with local losses "
            "use their option probe, for layerpipe mode='stages', in which tasks are not placed apart"
        )


def _copies(stage: Stage) -> list[Tensor]:
    return [p.detach().clone() for p in stage.params]


def _grad(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad.detach()


def _distance(found: Gradient, exact: Gradient) -> tuple[float, float, float]:
    """Cosine, ratio of norms and relative error of two lists of tensors, each taken as one vector."""
    product = square = square_exact = error = 0.0
    for g, r in zip(found, exact, strict=True):
        g, r = g.double(), r.double()
        product += float((g * r).sum())
        square += float(g.square().sum())
        square_exact += float(r.square().sum())
        error += float((g - r).square().sum())
    if square == 0.0 or square_exact == 0.0:
        same = square == square_exact
        return (1.0, 1.0, 0.0) if same else (0.0, math.inf if square else 0.0, math.inf if square else 1.0)
    cosine = product / math.sqrt(square * square_exact)
    return max(-1.0, min(1.0, cosine)), math.sqrt(square / square_exact), math.sqrt(error / square_exact)
