"""`unlatch bench throughput`: how fast the model of a settings file trains here, by every system that can train it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    conf: Annotated[Path, typer.Argument(metavar="CONF.toml", help="Settings.")],
    methods: Annotated[str | None, typer.Option(help="Ours, separated by commas; all of them by default.")] = None,
    ranks: Annotated[int | None, typer.Option(min=2, help="Processes; default: the file's, else 2.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Interleaved rounds; 5, with --quick 3.")] = None,
    steps: Annotated[int | None, typer.Option(min=2, help="Batches per measurement; 12, with --quick 4.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Within 3 minutes: fewer rounds and micro-batches.")] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Measure plain PyTorch and our methods compiled as well.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Picture of the rows, as PNG or SVG.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override any setting; repeatable.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare plain PyTorch, DDP, torch's pipelines and our methods on your model.

    \b
    unlatch bench throughput conf.toml --quick
    unlatch bench throughput conf.toml --methods pipedream,dtr --ranks 4 --out speed.png --json

    Samples per second, as a ratio to plain PyTorch with one thread, and as a share of the limit: as many independent
    processes at once. All take turns on the same processes. What cannot train the model has its reason in the table.
    """
    from .throughputs import Request, bench_throughput

    bench_throughput(
        Request(
            conf=conf,
            methods=methods,
            ranks=ranks,
            rounds=rounds or (3 if quick else 5),
            steps=steps or (4 if quick else 12),
            quick=quick,
            compiled=compiled,
            out=out,
            overrides=overrides or [],
            data_dir=data_dir,
            as_json=as_json,
        )
    )
