"""`unlatch plan`: where to put which work, and which method to take."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..advise.ranking import plan_auto
from ..errors import ConfigError
from ..methods import get, names
from ..methods.planner import Placement, Planner, PlanRequest
from ..schedule.channel import FREE, Channel
from ..schedule.machine import Machine
from .console import emit_json, people
from .planning import (
    ArraySide,
    BatchSize,
    CostModel,
    CostsFile,
    CostSource,
    Layers,
    check_devices,
    layer_costs,
    machine_of,
    writable,
)

__all__ = ["command"]

_AUTO = "auto"


@dataclass(frozen=True)
class _Wish:
    """What to plan and how; `flags` are those that belong to one planner or to `auto`, as far as they were given."""

    method: str
    devices: int
    machine: Machine
    flags: dict[str, Any]

    @property
    def channel(self) -> Channel:
        assert isinstance(self.machine.channel, Channel)
        return self.machine.channel

    @property
    def planner(self) -> Planner | None:
        """That of the method; `None` for `auto`."""
        return None if self.method == _AUTO else _planners()[self.method]

    @property
    def request(self) -> PlanRequest:
        """For the planner; the costs are yet to come."""
        return PlanRequest(self.devices, self.channel, self.flags)

    def check(self) -> _Wish:
        """Refuse what would be ignored."""
        owners = {name: planner.flags for name, planner in _planners().items()} | {_AUTO: ("memory",)}
        if self.method not in owners:
            *others, last = owners
            raise ConfigError(f"--method is {', '.join(others)} or {last}, got {self.method!r}")
        for flag in self.flags:
            if flag not in owners[self.method]:
                owner = next(name for name, flags in owners.items() if flag in flags)
                raise ConfigError(f"--{flag} belongs to --method {owner}, not to {self.method}: leave one of them out")
        memory = self.flags.get("memory")
        if memory is not None and not 0 < memory < math.inf:
            raise ConfigError(f"--memory is a number of bytes above 0, got {memory}")
        if self.planner is not None:
            self.planner.check(self.request)
        return self


def _planners() -> dict[str, Planner]:
    found = {name: get(name).planner for name in names()}
    return {name: planner for name, planner in found.items() if planner is not None}


def command(
    conf: Annotated[Path | None, typer.Argument(metavar="[CONF.toml]", help="Settings: plan this model.")] = None,
    costs: CostsFile = None,
    network: Annotated[str | None, typer.Option(help="A published network: alexnet, vgg16, resnet50, ...")] = None,
    cost_model: CostModel = None,
    batch: BatchSize = None,
    array: ArraySide = None,
    devices: Annotated[int, typer.Option(min=1, help="Where to place the work.")] = 2,
    method: Annotated[str, typer.Option(help=f"{', '.join(_planners())}, or auto: all methods, ranked.")] = "auto",
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
    """Place the work of a network on devices, or rank all methods for it.

    \b
    unlatch plan conf.toml --devices 4 -o plan.json && unlatch train conf.toml --plan plan.json
    unlatch plan --network vgg16 --devices 8 --method layerpipe
    unlatch plan --costs layers.json --devices 4 --method layerpipe --mode atomic --json

    The JSON of a plan for a model is what `unlatch train --plan` takes.
    """
    writable(out, "--out")
    machine = machine_of(bandwidth, latency)
    flags = {"mode": mode, "placement": placement, "replicate": replicate or None, "memory": memory}
    given = {name: value for name, value in flags.items() if value is not None}
    wish = _Wish(method, check_devices(devices), machine, given).check()
    placed = _plan(wish, layer_costs(CostSource(costs, network, conf, cost_model, batch, array, data_dir)))
    answer, lines = placed.answer, placed.lines
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


def _plan(wish: _Wish, layers: Layers) -> Placement:
    if wish.planner is not None:
        return wish.planner.plan(replace(wish.request, costs=layers.costs, linear=layers.linear))
    ranked = plan_auto(
        layers.costs,
        wish.devices,
        memory_limit=wish.flags.get("memory"),
        batch_size=layers.batch,
        machine=wish.machine,
        linear=layers.linear,
    )
    return Placement(ranked.to_json(), ranked.table())
