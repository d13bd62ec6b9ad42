"""`unlatch train`: settings in, a run folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["command"]


def command(
    conf: Annotated[
        Path | None, typer.Argument(metavar="CONF.toml", help="Settings. With --resume those of the run, unless given.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Another method than the file's; see `unlatch methods`.")] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What `unlatch plan` wrote: method, cut, one process per device in use."),
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages that the model is cut into.")] = None,
    processes: Annotated[int | None, typer.Option(help="Local processes that share the stages; 1 runs inline.")] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Copies of the network, each on its share of the processes and of every batch.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data, earlier ones included.")] = None,
    messages: Annotated[
        str | None, typer.Option(help="How states and gradients travel between stages: exact, bf16 or int8.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Stages by torch.compile, as the file says or by inductor.")
    ] = False,
    transport: Annotated[
        str | None, typer.Option(help="Which way messages take between processes: auto, gloo, or nccl on cuda.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where stages compute: auto, cpu, cuda (one per process), cuda:1.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override any setting; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; default: the next free runs/METHOD-N.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in --out.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|latest",
            help="Continue the run in this folder, or from one checkpoint of it; latest: the newest in runs/ or --out.",
        ),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    save_every: Annotated[
        str | None,
        typer.Option(
            metavar="INTERVAL",
            help='Checkpoints on the way: "50 batches", "5 minutes", "2 epochs"; a number alone means epochs.',
        ),
    ] = None,
    keep_last: Annotated[int, typer.Option(metavar="N", min=1, help="Checkpoints that stay.")] = 2,
    keep_best: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Further ones that stay, by accuracy; saves at every epoch's end."),
    ] = 0,
    max_restarts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Start all processes anew, from the last checkpoint, when one is lost; saves every 5 minutes unless "
            "told otherwise. Under torchrun use torchrun's own --max-restarts.",
        ),
    ] = 0,
    probe: Annotated[
        Literal["gradients"] | None,
        typer.Option(help="Compare the method's gradients with backpropagation's; inline runs only."),
    ] = None,
    probe_every: Annotated[int, typer.Option(metavar="UPDATES", min=1, help="How often to compare.")] = 10,
    recalibrate: Annotated[
        int,
        typer.Option(
            metavar="BATCHES",
            min=0,
            help="At the end evaluate again, with batch norm estimated anew on so many training batches.",
        ),
    ] = 0,
    live: Annotated[
        bool, typer.Option("--live", help="Serve a page that shows the run while it trains, on this machine only.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=65535, help="Where --live serves; default: any free port.")
    ] = None,
    beside: Annotated[
        list[Path] | None, typer.Option(metavar="RUN_DIR", help="A run to show beside this one; repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to stderr.")
    ] = False,
) -> None:
    """Train a model and keep everything about it in a run folder.

    \b
    unlatch train conf.toml
    unlatch train conf.toml --method dtrp --stages 4 --processes 2 --set optimizer.lr=0.05
    unlatch train --resume runs/dtrp-1 --epochs 20
    unlatch train conf.toml --stages 2 --processes 2 --save-every "5 minutes" --max-restarts 3
    unlatch train --resume latest
    unlatch train conf.toml --live --beside runs/bp-1
    unlatch train conf.toml --method fdg --stages 4 --probe gradients
    unlatch train conf.toml --method 1f1b --stages 2 --replicas 2 --processes 4
    torchrun --nproc-per-node 4 -m unlatch train conf.toml --stages 4

    The smallest settings file is two lines: [model] and name = "resnet20". Ctrl-C, or SIGTERM, finishes the batch under
    way, writes a checkpoint and exits with code 130, or 143; a second one exits at once. The run that is continued is,
    bit for bit, the one that was never stopped.
    """
    from .training import Request, train

    train(
        Request(
            conf=conf,
            method=method,
            plan=plan,
            overrides=overrides or [],
            run={
                "stages": stages,
                "processes": processes,
                "replicas": replicas,
                "epochs": epochs,
                "messages": messages,
                "transport": transport,
                "device": device,
            },
            compiled=compiled,
            data_dir=data_dir,
            out=out,
            overwrite=overwrite,
            resume=resume,
            save_every=save_every,
            keep_last=keep_last,
            keep_best=keep_best,
            max_restarts=max_restarts,
            probe_every=probe_every if probe is not None else 0,
            recalibrate=recalibrate,
            live=live,
            port=port,
            beside=beside or [],
            as_json=as_json,
        )
    )
