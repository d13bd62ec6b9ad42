"""`unlatch plan`: where to put which work, and which method to take."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from .console import emit_json, people
from .cost_flags import ArraySide, BatchSize, CostModel, CostsFile, CostSource, NetworkName

__all__ = ["command"]


def command(
    conf: Annotated[Path | None, typer.Argument(metavar="CONF.toml", help="Settings: plan this model.")] = None,
    costs: CostsFile = None,
    network: Annotated[NetworkName | None, typer.Option(help="A published network.")] = None,
    cost_model: CostModel = None,
    batch: BatchSize = None,
    array: ArraySide = None,
    devices: Annotated[int, typer.Option(min=1, help="Where to place the work.")] = 2,
    method: Annotated[
        str,
        typer.Option(
            metavar="auto|NAME", help="auto: all methods, ranked; or one that plans by itself: layerpipe, pipedream."
        ),
    ] = "auto",
    mode: Annotated[
        Literal["divisible", "atomic", "factor"] | None,
        typer.Option(help="layerpipe: what of a task may be shared.  [default: divisible]"),
    ] = None,
    placement: Annotated[
        Literal["row", "list", "exact"] | None,
        typer.Option(help="layerpipe: neighbours only, anywhere, anywhere and proven.  [default: row]"),
    ] = None,
    replicate: Annotated[bool, typer.Option(help="pipedream: allow several workers per stage.")] = False,
    bandwidth: Annotated[float, typer.Option(help="Bytes per unit of time of every link.")] = math.inf,
    latency: Annotated[float, typer.Option(help="Time a message travels.")] = 0.0,
    ideal: Annotated[
        bool, typer.Option("--ideal", help="Actions, updates and messages cost nothing; by default measured here.")
    ] = False,
    memory: Annotated[float | None, typer.Option(metavar="BYTES", help="auto: memory of one device.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Also write the JSON here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Place the work of a network on devices, or rank all methods.

    \b
    unlatch plan conf.toml --devices 4 -o plan.json && unlatch train conf.toml --plan plan.json
    unlatch plan --network vgg16 --devices 8 --method layerpipe
    unlatch plan --costs layers.json --devices 4 --method layerpipe --mode atomic --json

    The JSON of a plan for a model is what `unlatch train --plan` takes. A plan by measured costs counts what actions,
    updates and messages take between two processes of this machine.
    """
    from dataclasses import replace

    from ..schedule.channel import FREE
    from .placing import Wish, place
    from .planning import check_devices, layer_costs, machine_of, measured_machine, writable

    writable(out, "--out")
    machine = machine_of(bandwidth, latency)
    flags = {"mode": mode, "placement": placement, "replicate": replicate or None, "memory": memory}
    given = {name: value for name, value in flags.items() if value is not None}
    wish = Wish(method, check_devices(devices), machine, given).check()
    layers = layer_costs(CostSource(costs, network, conf, cost_model, batch, array, data_dir))
    measured = layers.update is not None and not ideal
    if measured:
        wish = replace(wish, machine=measured_machine(machine))
    placed = place(wish, layers if measured else layers._replace(update=None))
    answer, lines = placed.answer, placed.lines
    if machine.channel != FREE:
        answer["links"] = {"bandwidth": bandwidth if bandwidth < math.inf else None, "latency": latency}
        lines.append(
            "links of this bandwidth and latency are counted in the plan; training uses the links of its machine"
        )
    if measured:
        answer["measured"] = {"action": wish.machine.action, "update": layers.update}
        line = (
            f"measured here: an action takes {1e6 * wish.machine.action:.0f} us beside its work, an update of all "
            f"weights {1e3 * (layers.update or 0):.2f} ms"
        )
        if machine.channel == FREE:
            answer["measured"] |= {"bandwidth": wish.channel.bandwidth, "latency": wish.channel.latency}
            link = f"{1e6 * wish.channel.latency:.0f} us and its bytes {wish.channel.bandwidth / 1e9:.2f} GB/s"
            line += f", a message {link}"
        lines.append(line)
    if out is not None:
        out.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")
    if as_json:
        emit_json(answer)
    else:
        people().print("\n".join(lines))
