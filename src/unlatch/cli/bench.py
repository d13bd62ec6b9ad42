"""`unlatch bench`: how fast methods train one model here, against plain backpropagation in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["command"]


def command(
    conf: Annotated[Path, typer.Argument(metavar="CONF.toml", help="Settings.")],
    methods: Annotated[str, typer.Option(help="Names separated by commas; see `unlatch methods`.")],
    stages: Annotated[int | None, typer.Option(help="Stages that the model is cut into.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Local processes; default: the file's, else the stages of all replicas.")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the network, each on its share of the processes and of every batch.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often each method is measured, taking turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Batches in one measurement.")] = 20,
    skip: Annotated[int, typer.Option(min=0, help="Batches before it, which fill the pipeline.")] = 5,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Measure everything twice, as it is and compiled by torch.compile.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override any setting; repeatable.")
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every measurement as JSON.")] = False,
) -> None:
    """Measure how fast methods train, against backpropagation.

    \b
    unlatch bench conf.toml --methods 1f1b,pipedream,fdg,dtr --stages 2
    unlatch bench conf.toml --methods dtrp --stages 4 --processes 2 --repeats 9 --json
    unlatch bench conf.toml --methods pipedream,dtr --stages 2 --compile

    In samples per second, and as a ratio to backpropagation in one process. Methods take turns, so that whatever else
    the machine does hits all of them alike; the ratio is the median of the ratios within each turn. Compiling is over
    before a measurement begins.
    `unlatch bench throughput` compares with DDP, torch's own pipelines and the limit of the machine as well.
    """
    from .speeds import Request, bench

    bench(
        Request(
            conf=conf,
            methods=methods,
            stages=stages,
            processes=processes,
            replicas=replicas,
            repeats=repeats,
            steps=steps,
            skip=skip,
            compiled=compiled,
            overrides=overrides or [],
            data_dir=data_dir,
            as_json=as_json,
        )
    )
