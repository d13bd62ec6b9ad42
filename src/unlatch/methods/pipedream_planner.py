"""PipeDream's plans from costs alone: where to cut, and how many workers each stage gets."""

from __future__ import annotations

import math

from ..errors import ConfigError
from ..plan.pipedream_plan import PipeDreamPlan
from ..plan.pipedream_planner import plan_pipedream, plan_straight
from .planner import Placement, Planner, PlanRequest, figures

__all__ = ["PipeDreamPlanner"]


class PipeDreamPlanner(Planner):
    """`replicate` allows several workers per stage."""

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


def _lines(plan: PipeDreamPlan) -> list[str]:
    lines = [f"{'stage':>5}  {'layers':>9}  {'workers':>7}  versions"]
    for index, (stage, versions) in enumerate(zip(plan.stages, plan.versions, strict=True)):
        span = f"{stage.first}-{stage.end - 1}"
        lines.append(f"{index:>5}  {span:>9}  {stage.replicas:>7}  {versions}")
    lines += figures(plan.to_json())
    if any(stage.replicas > 1 for stage in plan.stages):
        lines.append("stages have several workers: `unlatch train --plan` runs each on one (leave --replicate out)")
    return lines
