"""`unlatch simulate`: methods in virtual time, on any number of devices."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .console import emit_json, people
from .cost_flags import ArraySide, BatchSize, CostModel, CostsFile, CostSource, NetworkName

if TYPE_CHECKING:
    from ..advise.prediction import MethodRun
    from ..report.sweep import SweepRow

__all__ = ["command"]

_PICTURES = (".png", ".svg", ".pdf")


def command(
    conf: Annotated[Path | None, typer.Argument(metavar="CONF.toml", help="Settings: simulate this model.")] = None,
    costs: CostsFile = None,
    network: Annotated[NetworkName | None, typer.Option(help="A published network; vgg16 if nothing is named.")] = None,
    cost_model: CostModel = None,
    batch: BatchSize = None,
    array: ArraySide = None,
    devices: Annotated[str, typer.Option(help="How many: 4, 2..64, 1,2,4 or 2..64*2.")] = "4",
    methods: Annotated[str, typer.Option(help="Names separated by commas; see `unlatch methods`.")] = "pipedream",
    replicas: Annotated[
        int, typer.Option(min=1, help="Copies of the network, each on its share of the devices and of every batch.")
    ] = 1,
    batches: Annotated[int | None, typer.Option(min=1, help="Batches; by default enough for a steady state.")] = None,
    bandwidth: Annotated[float, typer.Option(help="Bytes per unit of time of every link.")] = math.inf,
    latency: Annotated[float, typer.Option(help="Time a message travels.")] = 0.0,
    overlapped: Annotated[bool, typer.Option(help="Whether messages travel beside the computation.")] = True,
    jitter: Annotated[float, typer.Option(help="Relative standard deviation of every time.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the jitter.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Timeline, or curves of a sweep, as PNG or SVG.")] = None,
    html: Annotated[Path | None, typer.Option(help="Timeline as a page with zoom and hover.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Timeline for Perfetto.")] = None,
    csv: Annotated[Path | None, typer.Option(help="The rows as CSV.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Simulate methods: time, utilisation, staleness, memory, traffic.

    \b
    unlatch simulate --devices 2..64*2 --methods pipedream,layerpipe,petra,1f1b,zb-h2 --picture sweep.png
    unlatch simulate conf.toml --devices 4 --methods dtrp --html timeline.html --trace trace.json

    Replicas share out the rows of every batch and sum their gradients by messages, as `train --replicas` does. Pictures
    of time show the first method on the first number of devices; with several numbers --picture draws curves.
    """
    from ..advise.prediction import simulate_method
    from ..report.sweep import draw_sweep, parse_counts, sweep, write_sweep
    from .planning import check_devices, layer_costs, machine_of, writable

    if network is None and costs is None and conf is None:
        network = "vgg16"
    counts = [check_devices(count) for count in parse_counts(devices)]
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    if not names:
        raise ConfigError("--methods: which? Expected names separated by commas, as in pipedream,layerpipe")
    machine = machine_of(bandwidth, latency, overlapped=overlapped, jitter=jitter, seed=seed)
    for path, flag, endings in (
        (picture, "--picture", _PICTURES),
        (html, "--html", ()),
        (trace, "--trace", ()),
        (csv, "--csv", ()),
    ):
        writable(path, flag, endings)
    found = layer_costs(CostSource(costs, network, conf, cost_model, batch, array, data_dir))
    layers, samples, linear = found.costs, found.batch, found.linear
    run: dict[str, Any] = {
        "batches": batches,
        "batch_size": samples,
        "machine": machine,
        "linear": linear,
        "replicas": replicas,
    }
    rows = sweep(layers, counts, names, **run)
    if csv is not None:
        write_sweep(csv, rows)
    if picture is not None and len(counts) > 1:
        draw_sweep(rows).savefig(picture)
    if html is not None or trace is not None or (picture is not None and len(counts) == 1):
        one = simulate_method(names[0], layers, counts[0], **run)
        _draw(one, picture if len(counts) == 1 else None, html, trace)
    if as_json:
        emit_json({"rows": [asdict(row) for row in rows]})
    else:
        people().print("\n".join(_lines(rows)))


def _draw(run: MethodRun, picture: Path | None, html: Path | None, trace: Path | None) -> None:
    from ..report.timeline import save_timeline, timeline_html
    from ..report.trace import write_trace

    copies = f", {run.replicas} replicas" if run.replicas > 1 else ""
    title = f"{run.method.name}, {run.devices} devices{copies} (simulated)"
    source = run.simulation
    if picture is not None:
        save_timeline(picture, source, title=title)
    if html is not None:
        html.write_text(timeline_html(source, title=title), encoding="utf-8")
    if trace is not None:
        write_trace(trace, source)


def _lines(rows: list[SweepRow]) -> list[str]:
    from ..table import Table

    copies = any(row.replicas > 1 for row in rows)
    where = ("devices", "replicas") if copies else ("devices",)
    heads = ("method", *where, "time/batch", "speed-up", "utilisation", "late", "bytes sent")
    body = tuple(
        (
            row.method,
            str(row.devices),
            *([str(row.replicas)] * copies),
            f"{row.time_per_batch:.6g}",
            f"{row.speedup:.2f}x",
            f"{row.utilisation:.1%}",
            f"{row.staleness:.2f}",
            f"{row.communication_bytes:,.6g}",
        )
        for row in rows
    )
    return Table(heads, body).lines()
