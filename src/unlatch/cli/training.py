"""What `unlatch train` does: settings in, a run folder out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ..advise.advice import Advice
from ..config import Config, load
from ..data.loader import Loader
from ..errors import ConfigError, Interrupted, PlanError, UnlatchError
from ..io.checkpoints import Checkpoints
from ..io.durable import current
from ..io.run_folder import RunFolder, checkpoints_in, facts_of, settings_in
from ..io.space import shortage
from ..live.beside import PageBeside
from ..live.following import Followed
from ..lookup import also_searched, search_also
from ..methods import get
from ..report.stages import stage_table
from ..train.compile_options import DEFAULT_BACKEND
from ..train.trainer import Every
from ..transport.launch import Ranks
from ..transport.restarts import restarts
from .console import Reported, emit_json, flags_of, people
from .continuing import Continued, continued
from .prepare import PreparedRun, loaders, prepare
from .ranks import all_ranks, rank, torchrun_name, under_torchrun
from .session import SessionOptions, train_session
from .settings import read_settings, with_run
from .stopping import heeding_stop_file

__all__ = ["Request", "train"]

#: Under which names a run's facts say which torchrun has begun it, and beside which files its modules may lie.
_TORCHRUN, _BESIDE = "torchrun", "beside"


@dataclass(frozen=True)
class Request:
    """The flags."""

    conf: Path | None
    method: str | None
    plan: Path | None
    overrides: list[str]
    run: dict[str, Any]
    compiled: bool
    data_dir: str | None
    out: Path | None
    overwrite: bool
    resume: str | None
    save_every: str | None
    keep_last: int
    keep_best: int
    max_restarts: int
    probe_every: int
    recalibrate: int
    live: bool
    port: int | None
    beside: list[Path]
    as_json: bool


def train(request: Request) -> None:
    """Train and say what came of it; a run that was interrupted exits by the code of its signal."""
    request = replace(request, save_every=_interval(request.save_every, request.keep_best, request.max_restarts))
    with _page(request) as page:
        summary = _under_torchrun(request, page) if under_torchrun() else _here(request, page)
        if rank() == 0:
            _report(summary, request.as_json)
    if summary["status"] == "interrupted":
        raise typer.Exit(128 + (summary["signal"] or signal.SIGINT))


def _interval(save_every: str | None, keep_best: int, max_restarts: int) -> str | None:
    """The time between checkpoints as `Trainer` takes it."""
    if save_every is None:
        return "1 epochs" if keep_best else "5 minutes" if max_restarts else None
    text = f"{save_every} epochs" if save_every.strip().isdigit() else save_every
    every = Every.parse(text) if text != "0 epochs" else None
    if keep_best and (every is None or every.unit != "epochs"):
        raise ConfigError(f"--keep-best compares models at ends of epochs, but --save-every is {save_every!r}")
    return text if every is not None else None


def _page(request: Request) -> AbstractContextManager[PageBeside | None]:
    """The page that shows the run, if one is asked for; the first rank has it."""
    if not request.live and (request.port is not None or request.beside):
        flag = "--beside" if request.port is None else "--port"
        raise ConfigError(f"{flag} is about the page of --live: add --live")
    for folder in request.beside:
        Followed(folder)
    return PageBeside(request.port or 0) if request.live and rank() == 0 else nullcontext()


def _here(request: Request, page: PageBeside | None) -> dict[str, Any]:
    """Train inline, or on ranks started from here."""
    with _ready(request, page) as (prepared, options, data):
        run = prepared.config.run
        if run.processes == 1:
            return {**train_session(prepared, options, data), "out": options.folder}
        with Ranks(run.processes, threads=run.threads, max_restarts=request.max_restarts) as ranks:
            return {**ranks.run(train_session, prepared, options)[0], "out": options.folder}


def _under_torchrun(request: Request, page: PageBeside | None) -> dict[str, Any]:
    """Train as one of the processes that torchrun started; the first decides for all."""
    with all_ranks() as world, ExitStack() as opened:
        request.run["processes"] = world.size
        found: tuple[PreparedRun, SessionOptions] | UnlatchError | None = None
        data = None
        if world.rank == 0:
            try:
                prepared, options, data = opened.enter_context(_ready(request, page))
                found = prepared, options
            except UnlatchError as error:
                found = error
        # Before what names modules there can be understood.
        for folder in world.broadcast(also_searched()):
            search_also(folder)
        agreed = world.broadcast(found)
        if isinstance(agreed, UnlatchError):
            raise agreed if world.rank == 0 else Reported(str(agreed)) from agreed
        assert agreed is not None
        prepared, options = agreed
        return {**train_session(prepared, options, data), "out": options.folder}


@contextmanager
def _ready(
    request: Request, page: PageBeside | None
) -> Iterator[tuple[PreparedRun, SessionOptions, tuple[Loader, Loader]]]:
    """All that is decided before any process trains, and the folder of the run."""
    before = continued(request.resume, request.out) if request.resume is not None else None
    for folder in facts_of(before.folder).get(_BESIDE, []) if before is not None else []:
        search_also(folder)
    config, notes = _settings(request, before)
    begun = _begun_by_torchrun(request, config, before)
    if begun is not None:
        saved = Checkpoints(checkpoints_in(begun)).latest() is not None
        before = continued(str(begun)) if saved else None
    data = loaders(config)
    prepared = _prepare(request, config, data[0], before)
    with _folder(request, config, before.folder if before is not None else begun) as folder:
        console = people(request.as_json)
        _announce(console, prepared, notes, folder, before)
        _check_room(prepared, folder, before)
        if page is not None:
            page.show(folder.path, *request.beside)
            console.print(f"live: {page.url}")
        warned = [prepared.advice.warning] if prepared.advice.warning is not None else []
        live = (*notes, *prepared.notes, *warned) if request.live else None
        with heeding_stop_file(folder.path):
            yield prepared, _session_options(request, folder, before, live), data


def _settings(request: Request, before: Continued | None) -> tuple[Config, list[str]]:
    source = request.conf or (settings_in(before.folder) if before is not None else None)
    if source is None:
        raise ConfigError("which settings? Expected a TOML file: unlatch train conf.toml")
    if before is not None and request.plan is not None:
        raise ConfigError("--plan is for a new run; one that is continued with --resume keeps its plan")
    if before is not None and request.out is not None and request.resume != "latest":
        raise ConfigError(f"--out is for a new run; one that is continued with --resume stays in {before.folder}")
    config, notes = read_settings(
        source,
        request.overrides,
        method=request.method,
        data_dir=request.data_dir,
        plan=request.plan,
        **request.run,
    )
    if request.compiled and not config.run.compile:
        config = with_run(config, compile=DEFAULT_BACKEND)
    _check_probe(request, config)
    if request.max_restarts and under_torchrun():
        raise ConfigError("--max-restarts is torchrun's to say here: torchrun --max-restarts N -m unlatch train ...")
    if request.max_restarts and config.run.processes == 1:
        raise ConfigError("--max-restarts needs processes of which one can be lost: add --processes 2 or more")
    return config, notes


def _check_probe(request: Request, config: Config) -> None:
    if request.probe_every and config.run.processes > 1:
        raise ConfigError(
            f"--probe needs the whole network in one process, not {config.run.processes}: add --processes 1; the "
            "weights are the same, bit for bit"
        )
    if request.probe_every:
        get(config.method.name, **config.method.options).probing(request.probe_every)


def _begun_by_torchrun(request: Request, config: Config, before: Continued | None) -> Path | None:
    """The folder of the run that this process is to go on with because the same torchrun has begun it."""
    name = torchrun_name()
    if name is None or not under_torchrun():
        return None
    chosen = before.folder if before is not None else request.out or config.run.out
    # A name may be given again to another torchrun; only where the folder is said to be this run's is it enough.
    if restarts() == 0 and (chosen is None or before is not None or request.overwrite):
        return None
    candidates = [Path(chosen)] if chosen is not None else sorted(Path("runs").glob("*"))
    return next((path for path in candidates if facts_of(path).get(_TORCHRUN) == name), None)


def _prepare(request: Request, config: Config, train: Loader, before: Continued | None) -> PreparedRun:
    try:
        return prepare(config, train, before if before is not None and _goes_on(before, config) else None)
    except PlanError as error:
        if request.plan is None or str(request.plan) in str(error):
            raise
        raise PlanError(f"the plan file {request.plan} does not suit this model: {error}") from None


def _goes_on(before: Continued, config: Config) -> bool:
    """Whether it stays the same run: its model, method and cut as asked for."""
    earlier = load(settings_in(before.folder))
    same = (earlier.model, earlier.method) == (config.model, config.method)
    return same and (earlier.run.stages, earlier.run.split) == (config.run.stages, config.run.split)


@contextmanager
def _folder(request: Request, config: Config, existing: Path | None) -> Iterator[RunFolder]:
    """Where the run writes; one that ends before there is anything to keep leaves no folder behind."""
    if existing is not None:
        found = RunFolder.resume(existing)
    elif (chosen := request.out or config.run.out) is not None:
        found = RunFolder.at(chosen, overwrite=request.overwrite)
    else:
        found = RunFolder.new(config.method.name)
    with found as folder:
        try:
            begun = {_TORCHRUN: torchrun_name()} if under_torchrun() else {}
            folder.describe(config.dump(), {_BESIDE: also_searched(), **begun})
            yield folder
        except BaseException as error:
            saved = Checkpoints(checkpoints_in(folder.path)).latest() is not None
            if saved and isinstance(error, Interrupted):
                error.add_note(_how_to_continue(folder.path))
            if existing is None and not saved and not _has_numbers(folder.path):
                folder.discard()
            raise


def _has_numbers(folder: Path) -> bool:
    numbers = folder / "metrics.jsonl"
    return numbers.exists() and numbers.stat().st_size > 0


def _check_room(prepared: PreparedRun, folder: RunFolder, before: Continued | None) -> None:
    """Refuse what would end without room for its checkpoint: the weights and, for the optimizer, as much again."""
    needed = 2 * 4 * sum(prepared.plan.parameters)
    if before is not None:
        needed = max(needed, sum(file.stat().st_size for file in current(before.checkpoint).iterdir()))
    problem = shortage(folder.path, needed, "one checkpoint")
    if problem is not None:
        raise ConfigError(problem)


def _session_options(
    request: Request, folder: RunFolder, before: Continued | None, live: tuple[str, ...] | None
) -> SessionOptions:
    return SessionOptions(
        str(folder.path),
        resume=str(before.checkpoint) if before is not None else None,
        save_every=request.save_every,
        keep_last=request.keep_last,
        keep_best=request.keep_best,
        people_on_stderr=request.as_json,
        probe_every=request.probe_every,
        recalibrate=request.recalibrate,
        live=live,
    )


def _announce(
    console: Console, prepared: PreparedRun, notes: list[str], folder: RunFolder, before: Continued | None
) -> None:
    """What is going to happen, and what could go wrong with it."""
    config, stages = prepared.config, prepared.config.run.stages
    where = "inline" if config.run.processes == 1 else f"on {config.run.processes} processes"
    copies = f" x {config.run.replicas} replicas" if config.run.replicas > 1 else ""
    console.print(f"{config.method.name}, {stages} stage{'s'[: stages > 1]}{copies} {where}: {prepared.method}")
    console.print(str(prepared.plan))
    for note in [*notes, *prepared.notes]:
        console.print(f"note: {note}")
    _announce_delay(console, prepared.advice)
    if before is not None:
        console.print(f"continuing from {before}")
    console.print(f"writing to {folder.path}")


def _announce_delay(console: Console, advice: Advice) -> None:
    if advice.unknown is not None:
        console.print(f"stability: no advice: {advice.unknown}")
        return
    if not any(advice.lateness):
        console.print("stability: no gradient is late")
        return
    for line in advice.figures():
        console.print(line)
    if advice.warning is not None:
        console.print(f"warning: {advice.warning}", style="bold yellow")
        console.print(*flags_of(advice.cure), sep="\n")


def _how_to_continue(folder: str | Path) -> str:
    return f"continue with: unlatch train --resume {folder}"


def _report(summary: dict[str, Any], as_json: bool) -> None:
    console = people(as_json)
    if as_json:
        emit_json(summary)
    if summary["status"] == "interrupted":
        console.print(f"interrupted; {_how_to_continue(summary['out'])}")
    elif not as_json:
        _report_end(console, summary)


def _report_end(console: Console, summary: dict[str, Any]) -> None:
    if summary["stages"]:
        console.print(stage_table(summary["stages"]).text())
    accuracy = f", accuracy {summary['accuracy']:.4f}" if summary["accuracy"] is not None else ""
    if "recalibrated_accuracy" in summary:
        accuracy += f" ({summary['recalibrated_accuracy']:.4f} with batch norm recalibrated)"
    speed = f", {summary['samples_per_second']:,.0f} samples/s" if summary["samples_per_second"] is not None else ""
    # A run that was started anew when nothing was left to do has not been idle either.
    idle = f", bubble {summary['bubble']:.0%}" if summary["bubble"] is not None else ""
    console.print(f"done in {summary['seconds']:.1f} s{accuracy}{speed}{idle}: {summary['out']}")
    for remark in summary["remarks"]:
        console.print(remark)
