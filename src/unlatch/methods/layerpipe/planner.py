"""LayerPipe's plans from costs alone: every task on a device, in a row or anywhere."""

from __future__ import annotations

from dataclasses import replace

from ...errors import ConfigError
from ...plan.layerpipe import PlannedTasks, plan_layerpipe
from ...schedule.channel import FREE
from ...table import Table
from ..planner import Placement, Planner, PlanRequest, figures, number
from .exact import plan_exact
from .list_schedule import plan_list
from .task_planning import place_tasks

__all__ = ["LayerPipePlanner"]

_PLACEMENTS = ("row", "list", "exact")


class LayerPipePlanner(Planner):
    """`mode` as the method's own, without stages; `placement` in a row, by list scheduling, or proven best."""

    flags = ("mode", "placement")

    def check(self, request: PlanRequest) -> None:
        placement = request.flags.get("placement", "row")
        if placement not in _PLACEMENTS:
            raise ConfigError(f"--placement is row, list or exact, got {placement!r}")
        if placement != "row" and request.channel != FREE:
            raise ConfigError(
                f"--placement {placement} knows no links: leave --bandwidth and --latency out, or plan a row"
            )

    def plan(self, request: PlanRequest) -> Placement:
        planned = _planned(request)
        return Placement(planned.to_json(), _lines(planned))


def _planned(request: PlanRequest) -> PlannedTasks:
    costs, devices, mode = request.costs, request.devices, request.flags.get("mode", "divisible")
    placement = request.flags.get("placement", "row")
    if placement == "list":
        return plan_list(costs, devices, mode)
    if placement == "exact":
        return plan_exact(costs, devices, mode)
    if request.linear is None or request.channel != FREE:
        return plan_layerpipe(costs, devices, mode, channel=request.channel, linear=request.linear)
    planned, _, note = place_tasks(costs, devices, mode, request.linear)
    return replace(planned, plan=replace(planned.plan, note=note))


def _lines(planned: PlannedTasks) -> list[str]:
    by_device: dict[int, list[str]] = {}
    for kind, layer, device, fraction, slot in planned.tasks:
        share = "" if fraction == 1 else f" x {float(fraction):.3g}"
        by_device.setdefault(device, []).append(f"{kind}({layer}){share} slot {slot}")
    rows = [
        (str(device), number(float(planned.loads[device])), ", ".join(tasks))
        for device, tasks in sorted(by_device.items())
    ]
    return [*Table(("device", "load", "work"), rows, left=(2,)).lines(), *figures(planned.to_json())]
