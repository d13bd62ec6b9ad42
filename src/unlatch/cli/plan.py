"""`unlatch plan`: where to put which work, and which method to take."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from ..api.auto import plan_auto
from ..errors import ConfigError
from ..plan.exact import plan_exact
from ..plan.layer_costs import LayerCost
from ..plan.layerpipe import LayerPipePlan, plan_layerpipe
from ..plan.list_schedule import plan_list
from ..plan.pipedream_plan import PipeDreamPlan
from ..plan.pipedream_planner import plan_pipedream, plan_straight
from ..schedule.channel import Channel
from ..schedule.simulator_stages import Machine
from .console import emit_json, people
from .costs import CostSource, layer_costs

__all__ = ["command"]


def command(
    conf: Annotated[Path | None, typer.Argument(metavar="[CONF.toml]", help="Settings: plan this model.")] = None,
    costs: Annotated[Path | None, typer.Option(metavar="FILE", help="Layers as JSON: name, F, D, G, ... each.")] = None,
    network: Annotated[str | None, typer.Option(help="A published network: alexnet, vgg16, resnet50, ...")] = None,
    cost_model: Annotated[str | None, typer.Option(help="mac or systolic; for a model: measured or mac.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples per batch of a published network.")] = 1,
    array: Annotated[int, typer.Option(min=1, help="Rows and columns of a systolic array.")] = 128,
    processors: Annotated[int, typer.Option(min=1, help="Devices.")] = 2,
    method: Annotated[str, typer.Option(help="layerpipe, pipedream, or auto: all methods, ranked.")] = "auto",
    mode: Annotated[str, typer.Option(help="layerpipe: divisible, atomic or factor.")] = "divisible",
    placement: Annotated[
        str, typer.Option(help="layerpipe: row (neighbours only), list (anywhere), exact (anywhere, proven).")
    ] = "row",
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
    unlatch plan conf.toml --processors 4
    unlatch plan --network vgg16 --processors 8 --method layerpipe
    unlatch plan --costs layers.json --processors 4 --method layerpipe --mode atomic --json

    With auto, what stands under `config` in the JSON goes into a settings file for `unlatch train` as it is.
    """
    source = CostSource(costs, network, conf, cost_model, batch, array, data_dir)
    layers, samples = layer_costs(source)
    channel = Channel(bandwidth, latency)
    if method == "auto":
        ranked = plan_auto(
            layers, processors, memory_limit=memory, batch_size=samples, machine=Machine(channel=channel)
        )
        answer, lines = ranked.to_json(), ranked.table()
    elif method == "layerpipe":
        placed = _layerpipe(layers, processors, mode, placement, channel)
        answer, lines = placed.to_json(), _layerpipe_lines(placed)
    elif method == "pipedream":
        staged = plan_pipedream(layers, processors, bandwidth) if replicate else plan_straight(layers, processors)
        answer, lines = staged.to_json(), _pipedream_lines(staged)
    else:
        raise ConfigError(f"--method is layerpipe, pipedream or auto, got {method!r}")
    if out is not None:
        out.write_text(json.dumps(answer, indent=1) + "\n")
    if as_json:
        emit_json(answer)
    else:
        people().print("\n".join(lines))


def _layerpipe(layers: list[LayerCost], processors: int, mode: str, placement: str, channel: Channel) -> LayerPipePlan:
    if placement == "row":
        return plan_layerpipe(layers, processors, mode, channel=channel)
    if placement == "list":
        return plan_list(layers, processors, mode)
    if placement == "exact":
        return plan_exact(layers, processors, mode)
    raise ConfigError(f"--placement is row, list or exact, got {placement!r}")


def _layerpipe_lines(plan: LayerPipePlan) -> list[str]:
    answer = plan.to_json()
    by_processor: dict[int, list[str]] = {p: [] for p in range(plan.processors)}
    for task in answer["tasks"]:
        share = "" if task["fraction"] == 1 else f" x {task['fraction']:.3g}"
        by_processor[task["processor"]].append(f"{task['task']}({task['layer']}){share} slot {task['slot']}")
    lines = [f"{'processor':>9}  {'load':>10}  work"]
    for processor, tasks in by_processor.items():
        lines.append(f"{processor:>9}  {_number(answer['loads'][processor]):>10}  {', '.join(tasks)}")
    return [*lines, *_figures(answer)]


def _pipedream_lines(plan: PipeDreamPlan) -> list[str]:
    answer = plan.to_json()
    lines = [f"{'stage':>5}  {'layers':>9}  {'workers':>7}  versions"]
    for number, (stage, versions) in enumerate(zip(plan.stages, plan.versions, strict=True)):
        span = f"{stage.first}-{stage.end - 1}"
        lines.append(f"{number:>5}  {span:>9}  {stage.replicas:>7}  {versions}")
    return [*lines, *_figures(answer)]


def _figures(answer: dict[str, Any]) -> list[str]:
    return [
        f"initiation interval {_number(answer['initiation_interval'])}, "
        f"utilisation {float(answer['utilisation']):.1%}, "
        f"{_number(answer['communication_bytes'])} bytes between processors per batch",
        f"delays per layer: {', '.join(map(str, answer['delays']))}",
    ]


def _number(value: float) -> str:
    return f"{float(value):,.6g}"
