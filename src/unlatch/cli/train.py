"""`unlatch train`: settings in, a run folder out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console

from ..advise.advice import Advice
from ..config import Config, load
from ..data.loader import Loader
from ..errors import ConfigError, PlanError, UnlatchError
from ..io import checkpoint
from ..io.run_folder import RunFolder
from ..methods import get
from ..report.stages import stage_table
from ..transport.launch import Ranks
from .console import INTERRUPTED, Reported, emit_json, flags_of, people
from .prepare import PreparedRun, loaders, prepare
from .ranks import agree, join_torchrun, rank, under_torchrun
from .session import SessionOptions, train_session
from .settings import read_settings
from .stopping import stopping_on_signals

__all__ = ["command"]


class Probe(StrEnum):
    """What can be looked at while training."""

    gradients = "gradients"


@dataclass(frozen=True)
class _Request:
    """The flags."""

    conf: Path | None
    method: str | None
    plan: Path | None
    overrides: list[str]
    run: dict[str, Any]
    data_dir: str | None
    out: Path | None
    overwrite: bool
    resume: Path | None
    save_every: int
    probe_every: int
    recalibrate: int
    as_json: bool


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
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data, earlier ones included.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override any setting; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; default: the next free runs/METHOD-N.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run in --out.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the run in this folder.")] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where the data are; also UNLATCH_DATA.")] = None,
    save_every: Annotated[
        int, typer.Option(metavar="EPOCHS", min=0, help="Checkpoint every so many epochs (it empties the pipeline).")
    ] = 0,
    probe: Annotated[
        Probe | None, typer.Option(help="Compare the method's gradients with backpropagation's; inline runs only.")
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; progress goes to stderr.")
    ] = False,
) -> None:
    """Train a model and keep everything about it in a run folder.

    \b
    unlatch train conf.toml
    unlatch train conf.toml --method dtrp --stages 4 --processes 2 --set optimizer.lr=0.05
    unlatch train --resume runs/dtrp-1 --epochs 20
    unlatch train conf.toml --method fdg --stages 4 --probe gradients
    torchrun --nproc-per-node 4 -m unlatch train conf.toml --stages 4

    The smallest settings file is two lines: [model] and name = "resnet20". Ctrl-C finishes the batch under way, writes
    a checkpoint and exits with code 130; a second one exits at once.
    """
    run = {"stages": stages, "processes": processes, "epochs": epochs}
    request = _Request(
        conf=conf,
        method=method,
        plan=plan,
        overrides=overrides or [],
        run=run,
        data_dir=data_dir,
        out=out,
        overwrite=overwrite,
        resume=resume,
        save_every=save_every,
        probe_every=probe_every if probe is not None else 0,
        recalibrate=recalibrate,
        as_json=as_json,
    )
    summary = _under_torchrun(request) if under_torchrun() else _here(request)
    if rank() == 0:
        _report(summary, as_json)
    if summary["status"] == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _here(request: _Request) -> dict[str, Any]:
    """Train inline, or on ranks started from here."""
    console = people(request.as_json)
    config, notes = _settings(request)
    data = loaders(config)
    prepared = _prepare(request, config, data[0])
    with _folder(request, config) as folder, stopping_on_signals(folder.path):
        _announce(console, prepared, notes, folder)
        options = _session_options(request, folder)
        if config.run.processes == 1:
            return {**train_session(prepared, options, data), "out": str(folder.path)}
        with Ranks(config.run.processes, threads=config.run.threads) as ranks:
            return {**ranks.run(train_session, prepared, options)[0], "out": str(folder.path)}


def _under_torchrun(request: _Request) -> dict[str, Any]:
    """Train as one of the processes that torchrun started; the first decides for all."""
    join_torchrun()
    request.run["processes"] = dist.get_world_size()
    found: tuple[PreparedRun, SessionOptions] | UnlatchError | None = None
    data = None
    if rank() == 0:
        try:
            config, notes = _settings(request)
            data = loaders(config)
            prepared = _prepare(request, config, data[0])
            folder = _folder(request, config)
            _announce(people(request.as_json), prepared, notes, folder)
            found = prepared, _session_options(request, folder)
        except UnlatchError as error:
            found = error
    agreed = agree(found)
    if isinstance(agreed, UnlatchError):
        raise agreed if rank() == 0 else Reported(str(agreed)) from agreed
    assert agreed is not None
    prepared, options = agreed
    with stopping_on_signals(options.folder):
        return {**train_session(prepared, options, data), "out": options.folder}


def _settings(request: _Request) -> tuple[Config, list[str]]:
    source = request.conf
    if request.resume is not None:
        folder = RunFolder.resume(request.resume)
        if not checkpoint.exists(folder.path / "last"):
            raise ConfigError(f"{folder.path}: no checkpoint in it to continue from; expected {folder.path / 'last'}")
        source = source or _newest_settings(folder.path)
    if source is None:
        raise ConfigError("which settings? Expected a TOML file: unlatch train conf.toml")
    if request.resume is not None and request.plan is not None:
        raise ConfigError("--plan is for a new run; one that is continued with --resume keeps its plan")
    config, notes = read_settings(
        source,
        request.overrides,
        method=request.method,
        data_dir=request.data_dir,
        plan=request.plan,
        **request.run,
    )
    if request.probe_every and config.run.processes > 1:
        raise ConfigError(
            f"--probe needs the whole network in one process, not {config.run.processes}: add --processes 1; the "
            "weights are the same, bit for bit"
        )
    if request.probe_every:
        get(config.method.name, **config.method.options).probing(request.probe_every)
    return config, notes


def _prepare(request: _Request, config: Config, train: Loader) -> PreparedRun:
    try:
        return prepare(config, train, _before(request, config))
    except PlanError as error:
        if request.plan is None or str(request.plan) in str(error):
            raise
        raise PlanError(f"the plan file {request.plan} does not suit this model: {error}") from None


def _before(request: _Request, config: Config) -> dict[str, Any] | None:
    """What the run to continue was, as far as it stays the same run: its model, method and cut as asked for."""
    if request.resume is None:
        return None
    earlier = load(_newest_settings(request.resume))
    same = (earlier.model, earlier.method) == (config.model, config.method)
    if not same or (earlier.run.stages, earlier.run.split) != (config.run.stages, config.run.split):
        return None
    loop: dict[str, Any] = checkpoint.state(request.resume / "last")["loop"]
    return loop


def _newest_settings(folder: Path) -> Path:
    """The settings a run was last continued with: `config-3.toml` rather than `config.toml`."""
    numbered = {int(name): path for path in folder.glob("config-*.toml") if (name := path.stem[7:]).isdigit()}
    return numbered[max(numbered)] if numbered else folder / "config.toml"


def _folder(request: _Request, config: Config) -> RunFolder:
    if request.resume is not None:
        folder = RunFolder.resume(request.resume)
    elif (chosen := request.out or config.run.out) is not None:
        folder = RunFolder.at(chosen, overwrite=request.overwrite)
    else:
        folder = RunFolder.new(config.method.name)
    folder.describe(config.dump())
    return folder


def _session_options(request: _Request, folder: RunFolder) -> SessionOptions:
    return SessionOptions(
        str(folder.path),
        resume=request.resume is not None,
        save_every=request.save_every,
        people_on_stderr=request.as_json,
        probe_every=request.probe_every,
        recalibrate=request.recalibrate,
    )


def _announce(console: Console, prepared: PreparedRun, notes: list[str], folder: RunFolder) -> None:
    """What is going to happen, and what could go wrong with it."""
    config, stages = prepared.config, prepared.config.run.stages
    where = "inline" if config.run.processes == 1 else f"on {config.run.processes} processes"
    console.print(f"{config.method.name}, {stages} stage{'s'[: stages > 1]} {where}: {prepared.method}")
    console.print(str(prepared.plan))
    for note in [*notes, *prepared.notes]:
        console.print(f"note: {note}")
    _announce_delay(console, prepared.advice)
    console.print(f"writing to {folder.path}")


def _announce_delay(console: Console, advice: Advice | None) -> None:
    if advice is None:
        console.print("stability: no advice, since nothing is known of this optimizer's momentum")
        return
    if not any(advice.lateness):
        console.print("stability: no gradient is late")
        return
    for line in advice.table()[: len(advice.lateness) + 1]:
        console.print(line)
    if advice.warning is not None:
        console.print(f"warning: {advice.warning}", style="bold yellow")
        console.print(*flags_of(advice.cure), sep="\n")


def _report(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        emit_json(summary)
        return
    console = people()
    if summary["status"] == "interrupted":
        console.print(f"interrupted; continue with: unlatch train --resume {summary['out']}")
        return
    console.print(stage_table(summary["stages"]).text())
    accuracy = f", accuracy {summary['accuracy']:.4f}" if summary["accuracy"] is not None else ""
    if "recalibrated_accuracy" in summary:
        accuracy += f" ({summary['recalibrated_accuracy']:.4f} with batch norm recalibrated)"
    console.print(
        f"done in {summary['seconds']:.1f} s{accuracy}, {summary['samples_per_second']:,.0f} samples/s, "
        f"bubble {summary['bubble']:.0%}: {summary['out']}"
    )
    for remark in summary["remarks"]:
        console.print(remark)
