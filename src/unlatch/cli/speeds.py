"""What `unlatch bench` does: methods that train one model, against plain backpropagation in one process, in turns."""

from __future__ import annotations

import statistics as stats
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..config import Config, from_mapping
from ..data.loader import Loader
from ..errors import ConfigError
from ..io.versions import versions
from ..methods import BASELINE, get
from ..table import Table
from ..throughput.timing import WARM
from ..train.compile_options import DEFAULT_BACKEND
from ..transport.launch import Ranks
from .console import emit_json, people
from .prepare import PreparedRun, loaders, make_run, prepare
from .ranks import all_ranks
from .settings import options_by_hand, read_settings, with_method, with_run

__all__ = ["Request", "bench", "measure"]

_LABEL = f"{BASELINE}, one process"
#: The settings that batches depend on.
_OF_LOADER: Any = {"model": True, "data": True, "run": {"seed", "device"}}


@dataclass(frozen=True)
class Request:
    """The flags."""

    conf: Path
    methods: str
    stages: int | None
    processes: int | None
    replicas: int | None
    repeats: int
    steps: int
    skip: int
    compiled: bool
    overrides: list[str]
    data_dir: str | None
    as_json: bool


def bench(request: Request) -> None:
    """Measure all methods in turns and print how they compare."""
    config, steps, skip = _settings(request), request.steps, request.skip
    names = [name.strip() for name in request.methods.split(",") if name.strip()]
    if not names:
        raise ConfigError("--methods names none: expected names separated by commas")
    console, by_hand = people(request.as_json), options_by_hand(request.overrides)
    compiling = config.run.compile or (DEFAULT_BACKEND if request.compiled else False)
    runs = dict(_both_ways(_LABEL, _baseline(config), compiling, console))
    for name in names:
        chosen, notes = with_method(config, name, by_hand & {option.name for option in fields(get(name))})
        for note in notes:
            console.print(f"note: {note}")
        runs |= _both_ways(name, chosen, compiling, console)
        # Before anything is measured.
        runs[name].method.check_replicas(config.run.replicas)
    found: dict[str, list[float]] = {label: [] for label in runs}
    with _measuring(config) as run:
        for turn in range(request.repeats):
            for label, prepared in runs.items():
                found[label].append(run(label, prepared, steps, skip))
            shown = ", ".join(f"{label} {speeds[-1]:,.0f}" for label, speeds in found.items())
            console.print(f"turn {turn + 1}/{request.repeats}: {shown} samples/s")
    rows = {label: _row(speeds, found[_LABEL]) for label, speeds in found.items()}
    if request.as_json:
        settings = config.model_dump(mode="json")
        emit_json({"steps": steps, "skip": skip, "methods": rows, "settings": settings, "versions": versions()})
    else:
        console.print(_table(rows).text())


def _both_ways(
    label: str, config: Config, compiling: bool | str | dict[str, Any], console: Console
) -> Iterator[tuple[str, PreparedRun]]:
    """A run as it is and, if that is asked for and can be, compiled; by the names of their rows."""
    yield label, prepare(with_run(config, compile=False))
    if compiling:
        try:
            yield f"{label}, compiled", prepare(with_run(config, compile=compiling))
        except ConfigError as error:
            console.print(f"note: {error}")


def measure(prepared: PreparedRun, steps: int, skip: int) -> float:
    """Samples per second of a run, once its pipeline is full. Called alike on every rank."""
    torch.set_num_threads(prepared.config.run.threads)
    with all_ranks() as world:
        reads = world.rank == 0 or prepared.method.reads_on_every_rank
        loader = _loader(prepared.config.model_dump_json(include=_OF_LOADER)) if reads else None
        sample = world.broadcast(loader.batch(0, 0) if loader is not None else None)
        with make_run(prepared, sample) as run:
            if prepared.config.run.compile:
                # Code is made when it is first run, which for backwards is when the pipeline is full.
                skip = max(skip, WARM + -(-run.schedule.depth // run.method.per_batch))
            for number in range(skip):
                run.step(*_batch(loader, number))
            start = time.perf_counter()
            for number in range(skip, skip + steps):
                run.step(*_batch(loader, number))
            # The slowest rank counts: where nothing comes back, the first one may be far ahead.
            seconds = max(world.gather(time.perf_counter() - start))
            run.flush()
    return steps * prepared.config.data.batch_size / seconds


def _batch(loader: Loader | None, number: int) -> tuple[Any, Any]:
    # Only whole batches, the same few again and again.
    full = max(1, len(loader.data) // loader.batch_size) if loader is not None else 1
    return (None, None) if loader is None else loader.batch(0, number % full)


@lru_cache(maxsize=1)
def _loader(settings: str) -> Loader:
    """Read once per process, however often it measures."""
    return loaders(Config.model_validate_json(settings))[0]


@contextmanager
def _measuring(config: Config) -> Iterator[Any]:
    """A function that measures a run where it belongs: here, or on ranks that stay alive between calls."""
    if config.run.processes == 1:
        yield lambda label, *job: measure(*job)
        return
    with Ranks(config.run.processes, threads=config.run.threads) as ranks:
        yield lambda label, *job: measure(*job) if label.startswith(_LABEL) else ranks.run(measure, *job)[0]


def _settings(request: Request) -> Config:
    config, _ = read_settings(
        request.conf,
        request.overrides,
        data_dir=request.data_dir,
        judge_method=False,
        stages=request.stages,
        processes=request.processes,
        replicas=request.replicas,
    )
    if request.processes is None and config.run.processes == 1:
        config = with_run(config, processes=config.run.stages * config.run.replicas)
    return config


def _baseline(config: Config) -> Config:
    values = with_method(config, BASELINE)[0].model_dump(exclude_none=True)
    single = {"stages": 1, "processes": 1, "replicas": 1, "split": "auto"}
    return from_mapping(values | {"method": {"name": BASELINE}, "run": values["run"] | single})


def _row(speeds: list[float], baseline: list[float]) -> dict[str, Any]:
    return {
        "samples_per_second": stats.median(speeds),
        "ratio": stats.median(ours / theirs for ours, theirs in zip(speeds, baseline, strict=True)),
        "measurements": speeds,
    }


def _table(rows: dict[str, dict[str, Any]]) -> Table:
    body = tuple(
        (
            label,
            f"{row['samples_per_second']:,.0f}",
            f"{min(row['measurements']):,.0f} .. {max(row['measurements']):,.0f}",
            f"{row['ratio']:.2f}",
        )
        for label, row in rows.items()
    )
    return Table(("method", "samples/s", "slowest .. fastest", "ratio"), body)
