"""LayerPipe's plans from costs alone: every task on a device, in a row or anywhere."""

from __future__ import annotations

from ...errors import ConfigError
from ...plan.exact import plan_exact
from ...plan.layerpipe import LayerPipePlan, plan_layerpipe
from ...plan.list_schedule import plan_list
from ...plan.task_planning import place_tasks
from ...schedule.channel import FREE
from ..planner import Placement, Planner, PlanRequest, figures, number

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
        placed, note = _placed(request)
        return Placement(placed.to_json() | {"note": note}, [*_lines(placed), *([note] if note else [])])


def _placed(request: PlanRequest) -> tuple[LayerPipePlan, str]:
    """The plan, and what training does beyond it."""
    costs, devices, mode = request.costs, request.devices, request.flags.get("mode", "divisible")
    placement = request.flags.get("placement", "row")
    if placement == "list":
        return plan_list(costs, devices, mode), ""
    if placement == "exact":
        return plan_exact(costs, devices, mode), ""
    if request.linear is None or request.channel != FREE:
        return plan_layerpipe(costs, devices, mode, channel=request.channel, linear=request.linear), ""
    plan, _, note = place_tasks(costs, devices, mode, request.linear)
    return plan, note


def _lines(plan: LayerPipePlan) -> list[str]:
    answer = plan.to_json()
    by_device: dict[int, list[str]] = {}
    for task in answer["tasks"]:
        share = "" if task["fraction"] == 1 else f" x {task['fraction']:.3g}"
        by_device.setdefault(task["processor"], []).append(
            f"{task['task']}({task['layer']}){share} slot {task['slot']}"
        )
    lines = [f"{'device':>6}  {'load':>10}  work"]
    for device, tasks in sorted(by_device.items()):
        lines.append(f"{device:>6}  {number(answer['loads'][device]):>10}  {', '.join(tasks)}")
    lines += figures(answer)
    if not plan.contiguous:
        lines.append("tasks lie anywhere: `unlatch train --plan` follows only plans in a row (--placement row)")
    return lines
