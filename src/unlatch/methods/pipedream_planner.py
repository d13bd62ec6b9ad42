"""PipeDream's plans from costs alone: where to cut, and how many devices each stage gets."""

from __future__ import annotations

import math

from ..errors import ConfigError
from ..plan.pipedream import PlannedStages, plan_pipedream, plan_straight
from .planner import Placement, Planner, PlanRequest, figures

__all__ = ["PipeDreamPlanner"]


class PipeDreamPlanner(Planner):
    """`replicate` allows several devices per stage."""

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


def _lines(planned: PlannedStages) -> list[str]:
    lines = [f"{'stage':>5}  {'layers':>9}  {'devices':>7}  versions"]
    for index, (stage, versions) in enumerate(zip(planned.stages, planned.versions, strict=True)):
        span = f"{stage.first}-{stage.end - 1}"
        lines.append(f"{index:>5}  {span:>9}  {stage.replicas:>7}  {versions}")
    return [*lines, *figures(planned.to_json())]
