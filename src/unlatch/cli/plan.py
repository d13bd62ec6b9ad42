"""`unlatch plan`: where to put which work, and which method to take."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.auto import plan_auto
from ..errors import ConfigError
from ..plan.exact import plan_exact
from ..plan.layerpipe import LayerPipePlan, plan_layerpipe
from ..plan.list_schedule import plan_list
from ..plan.pipedream_plan import PipeDreamPlan
from ..plan.pipedream_planner import plan_pipedream, plan_straight
from ..plan.task_planning import place_tasks
from ..schedule.channel import FREE, Channel
from ..schedule.machine import Machine
from .console import emit_json, people
from .costs import ArraySide, BatchSize, CostModel, CostsFile, CostSource, Layers, layer_costs
from .machine import check_devices, machine_of, writable

__all__ = ["command"]

_PLACEMENTS = ("row", "list", "exact")


@dataclass(frozen=True)
class _Wish:
    """What to plan and how."""

    method: str
    processors: int
    mode: str | None
    placement: str | None
    replicate: bool
    memory: float | None
    machine: Machine

    @property
    def channel(self) -> Channel:
        assert isinstance(self.machine.channel, Channel)
        return self.machine.channel

    def check(self) -> _Wish:
        """Refuse what would be ignored."""
        if self.method not in ("auto", "layerpipe", "pipedream"):
            raise ConfigError(f"--method is layerpipe, pipedream or auto, got {self.method!r}")
        belongs = {
            "--mode": (self.mode is not None, "layerpipe"),
            "--placement": (self.placement is not None, "layerpipe"),
            "--replicate": (self.replicate, "pipedream"),
            "--memory": (self.memory is not None, "auto"),
        }
        for flag, (given, method) in belongs.items():
            if given and self.method != method:
                raise ConfigError(f"{flag} belongs to --method {method}, not to {self.method}: leave one of them out")
        if self.memory is not None and not 0 < self.memory < math.inf:
            raise ConfigError(f"--memory is a number of bytes above 0, got {self.memory}")
        if self.placement is not None and self.placement not in _PLACEMENTS:
            raise ConfigError(f"--placement is row, list or exact, got {self.placement!r}")
        if self.placement in ("list", "exact") and self.channel != FREE:
            raise ConfigError(
                f"--placement {self.placement} knows no links: leave --bandwidth and --latency out, or plan a row"
            )
        if self.method == "pipedream" and self.channel.latency:
            raise ConfigError("--latency has no place in PipeDream's formula: leave it out, or give --bandwidth alone")
        return self


def command(
    conf: Annotated[Path | None, typer.Argument(metavar="[CONF.toml]", help="Settings: plan this model.")] = None,
    costs: CostsFile = None,
    network: Annotated[str | None, typer.Option(help="A published network: alexnet, vgg16, resnet50, ...")] = None,
    cost_model: CostModel = None,
    batch: BatchSize = None,
    array: ArraySide = None,
    processors: Annotated[int, typer.Option(min=1, help="Devices.")] = 2,
    method: Annotated[str, typer.Option(help="layerpipe, pipedream, or auto: all methods, ranked.")] = "auto",
    mode: Annotated[
        str | None, typer.Option(help="layerpipe: divisible, atomic or factor.  [default: divisible]")
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(
            help="layerpipe: row (neighbours only), list (anywhere), exact (anywhere, proven).  [default: row]"
        ),
    ] = None,
    replicate: Annotated[bool, typer.Option(help="pipedream: allow several workers per stage.")] = False,
    bandwidth: Annotated[float, typer.Option(help="Bytes per unit of time of every link.")] = math.inf,
    latency: Annotated[float, typer.Option(help="Time a message travels.")] = 0.0,
    memory: Annotated[float | None, typer.Option(metavar="BYTES", help="auto: memory of one device.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Place the work of a network on processors, or rank all methods for it.

    \b
    unlatch plan conf.toml --processors 4 -o plan.json && unlatch train conf.toml --plan plan.json
    unlatch plan --network vgg16 --processors 8 --method layerpipe
    unlatch plan --costs layers.json --processors 4 --method layerpipe --mode atomic --json

    The JSON of a plan for a model is what `unlatch train --plan` takes.
    """
    writable(out, "--out")
    machine = machine_of(bandwidth, latency)
    wish = _Wish(method, check_devices(processors), mode, placement, replicate, memory, machine).check()
    answer, lines = _plan(wish, layer_costs(CostSource(costs, network, conf, cost_model, batch, array, data_dir)))
    if wish.channel != FREE:
        answer["links"] = {"bandwidth": bandwidth if bandwidth < math.inf else None, "latency": latency}
        lines.append(
            "links of this bandwidth and latency are counted in the plan; training uses the links of its machine"
        )
    if out is not None:
        out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit_json(answer)
    else:
        people().print("\n".join(lines))


def _plan(wish: _Wish, layers: Layers) -> tuple[dict[str, Any], list[str]]:
    if wish.method == "auto":
        ranked = plan_auto(
            layers.costs,
            wish.processors,
            memory_limit=wish.memory,
            batch_size=layers.batch,
            machine=wish.machine,
            linear=layers.linear,
        )
        return ranked.to_json(), ranked.table()
    if wish.method == "layerpipe":
        placed, note = _layerpipe(layers, wish)
        return placed.to_json() | {"note": note}, [*_layerpipe_lines(placed), *([note] if note else [])]
    bandwidth = wish.channel.bandwidth
    if bandwidth == math.inf and not wish.replicate:
        staged = plan_straight(layers.costs, wish.processors)
    else:
        staged = plan_pipedream(layers.costs, wish.processors, bandwidth, replicate=wish.replicate)
    return staged.to_json(), _pipedream_lines(staged)


def _layerpipe(layers: Layers, wish: _Wish) -> tuple[LayerPipePlan, str]:
    """The plan, and what training does beyond it."""
    costs, mode = layers.costs, "divisible" if wish.mode is None else wish.mode
    if wish.placement == "list":
        return plan_list(costs, wish.processors, mode), ""
    if wish.placement == "exact":
        return plan_exact(costs, wish.processors, mode), ""
    if layers.linear is None or wish.channel != FREE:
        return plan_layerpipe(costs, wish.processors, mode, channel=wish.channel, linear=layers.linear), ""
    plan, _, note = place_tasks(costs, wish.processors, mode, layers.linear)
    return plan, note


def _layerpipe_lines(plan: LayerPipePlan) -> list[str]:
    answer = plan.to_json()
    by_processor: dict[int, list[str]] = {}
    for task in answer["tasks"]:
        share = "" if task["fraction"] == 1 else f" x {task['fraction']:.3g}"
        by_processor.setdefault(task["processor"], []).append(
            f"{task['task']}({task['layer']}){share} slot {task['slot']}"
        )
    lines = [f"{'processor':>9}  {'load':>10}  work"]
    for processor, tasks in sorted(by_processor.items()):
        lines.append(f"{processor:>9}  {_number(answer['loads'][processor]):>10}  {', '.join(tasks)}")
    lines += _figures(answer)
    if not plan.contiguous:
        lines.append("tasks lie anywhere: `unlatch train --plan` follows only plans in a row (--placement row)")
    return lines


def _pipedream_lines(plan: PipeDreamPlan) -> list[str]:
    answer = plan.to_json()
    lines = [f"{'stage':>5}  {'layers':>9}  {'workers':>7}  versions"]
    for number, (stage, versions) in enumerate(zip(plan.stages, plan.versions, strict=True)):
        span = f"{stage.first}-{stage.end - 1}"
        lines.append(f"{number:>5}  {span:>9}  {stage.replicas:>7}  {versions}")
    lines += _figures(answer)
    if any(stage.replicas > 1 for stage in plan.stages):
        lines.append("stages have several workers: `unlatch train --plan` runs each on one (leave --replicate out)")
    return lines


def _figures(answer: dict[str, Any]) -> list[str]:
    idle = answer["processors"] - answer["busy_processors"]
    return [
        f"initiation interval {_number(answer['initiation_interval'])}, "
        f"utilisation {float(answer['utilisation']):.1%}, "
        f"{_number(answer['communication_bytes'])} bytes between processors per batch",
        *([f"{idle} of {answer['processors']} processors would gain nothing and stay idle"] if idle else []),
        f"delays per layer: {', '.join(map(str, answer['delays']))}",
    ]


def _number(value: float) -> str:
    return f"{float(value):,.6g}"
