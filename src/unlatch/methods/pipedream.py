"""PipeDream: 1F1B without flush, each gradient taken at the weights its forward used (Narayanan et al. 2019, 2021)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ConfigError
from ..plan.pipedream import PlannedStages, plan_pipedream, plan_straight
from ..rules.activations import Graph
from ..rules.bundle import Rules
from ..rules.weights import Lagging, Stash
from ..schedule import Schedule, one_f_one_b_async
from ..table import Table
from .base import Delayed, register
from .planner import Placement, Planner, PlanRequest, figures

__all__ = ["PipeDream", "PipeDream2BW", "PipeDreamPlanner"]


class PipeDreamPlanner(Planner):
    """Where to cut, and how many devices each stage gets, from costs alone; `replicate` allows several per stage."""

    flags = ("replicate",)

    def check(self, request: PlanRequest) -> None:
        if request.channel.latency:
            raise ConfigError("--latency has no place in PipeDream's formula: leave it out, or give --bandwidth alone")

    def plan(self, request: PlanRequest) -> Placement:
        bandwidth, replicate = request.channel.bandwidth, request.flags.get("replicate", False)
        if bandwidth == math.inf and not replicate:
            staged = plan_straight(request.costs, request.devices)
        else:
            staged = plan_pipedream(request.costs, request.devices, bandwidth, replicate=replicate)
        return Placement(staged.to_json(), _lines(staged))


@register
@dataclass(frozen=True)
class PipeDream(Delayed):
    """Weight stashing: stage k of K applies gradients that are K-k batches old.

    >>> PipeDream().lateness(3)
    (2, 1, 0)
    """

    name = "pipedream"
    summary = "1F1B without flush, weights stashed"
    planner = PipeDreamPlanner()

    def schedule(self, stages: int) -> Schedule:
        return one_f_one_b_async(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), Stash())


@register
@dataclass(frozen=True)
class PipeDream2BW(Delayed):
    """Two weight versions whatever the depth: every stage applies gradients that are exactly one update old.

    Needs at least as many micro-batches per batch as there are stages.
    """

    name = "pipedream-2bw"
    summary = "two weight versions, every stage one update behind"

    def schedule(self, stages: int) -> Schedule:
        if self.microbatches != "auto" and self.microbatches < stages:
            raise ConfigError(
                f"pipedream-2bw keeps two weight versions, which suffices only with at least as many micro-batches as "
                f"stages: got microbatches={self.microbatches} for {stages} stages"
            )
        return one_f_one_b_async(stages)

    def rules(self) -> Rules:
        return self._rules(Graph(), Stash(), forward=Lagging())

    def choose_microbatches(self, stages: int, batch_size: int | None) -> int:
        return stages

    def lateness(self, stages: int) -> tuple[int, ...]:
        parts = stages if self.microbatches == "auto" else self.microbatches
        return (parts * self.accumulate if stages > 1 else 0,) * stages


def _lines(planned: PlannedStages) -> list[str]:
    rows = [
        (str(index), f"{stage.first}-{stage.end - 1}", str(stage.replicas), str(versions))
        for index, (stage, versions) in enumerate(zip(planned.stages, planned.versions, strict=True))
    ]
    table = Table(("stage", "layers", "devices", "versions"), rows, left=())
    return [*table.lines(), *figures(planned.to_json())]
