"""What `unlatch bench throughput` does: settings to a subject, all systems in turns, rows as a table, JSON, picture."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..io.versions import versions
from ..methods import Method, get, names
from ..nn.tree import Tree
from ..table import Table
from ..throughput import Row, Subject, compare, draw, everybody
from ..train.compile_options import DEFAULT_BACKEND
from .console import emit_json, people
from .planning import writable
from .prepare import build_model, loaders, model_options
from .settings import options_by_hand, read_settings, with_method

__all__ = ["Request", "bench_throughput"]

#: Seconds of `--quick` after which nothing new is begun; the rest is for starting, for the last one, and for drawing.
_QUICK = 150.0
_QUICK_PARTS = (4,)
_PARTS = (2, 4, 8)


@dataclass(frozen=True)
class Request:
    """The flags."""

    conf: Path
    methods: str | None
    ranks: int | None
    rounds: int
    steps: int
    quick: bool
    compiled: bool
    out: Path | None
    overrides: list[str]
    data_dir: str | None
    as_json: bool


def bench_throughput(request: Request) -> None:
    """Measure everything in turns and print how it compares."""
    begun = time.monotonic()
    writable(request.out, "--out", (".png", ".svg", ".pdf"))
    config, _ = read_settings(request.conf, request.overrides, data_dir=request.data_dir, judge_method=False)
    ranks = request.ranks or max(config.run.processes, config.run.stages)
    ranks = ranks if ranks > 1 else 2
    chosen = _methods(config, request.methods, request.overrides)
    console = people(request.as_json)
    subject = _subject(config)
    compiling = config.run.compile or (DEFAULT_BACKEND if request.compiled else False)
    systems = everybody(subject, ranks, chosen, _QUICK_PARTS if request.quick else _PARTS, compile=compiling)
    rows = compare(
        subject,
        systems,
        ranks,
        rounds=request.rounds,
        steps=request.steps,
        seconds=_QUICK - (time.monotonic() - begun) if request.quick else None,
        say=console.print,
    )
    if request.out is not None:
        draw(rows, f"{config.model.name}, batch {config.data.batch_size}, {ranks} ranks").savefig(request.out, dpi=130)
    if request.as_json:
        emit_json(
            {
                "rows": [row.as_dict() for row in rows],
                "rounds": request.rounds,
                "steps": request.steps,
                "settings": config.model_dump(mode="json"),
                "versions": versions(),
            }
        )
    else:
        console.print(_table(rows).text())
        for row in rows:
            if row.reason is not None:
                console.print(f"{row.system} {row.method}: {row.reason}")


def _methods(config: Config, named: str | None, overrides: Sequence[str]) -> list[Method]:
    """Ours, with the file's options for them; by default all, the file's own first and local ones last."""
    if named is None:
        own = config.method.name
        wanted = sorted(names(), key=lambda name: (name != own, get(name).gradient == "local"))
    else:
        wanted = list(dict.fromkeys(name.strip() for name in named.split(",") if name.strip()))
        if not wanted:
            raise ConfigError("--methods names none: expected names separated by commas")
    by_hand = options_by_hand(overrides)
    found = []
    for name in wanted:
        settled = with_method(config, name, by_hand & {option.name for option in fields(get(name))})[0]
        found.append(get(settled.method.name, **settled.method.options))
    return found


def _subject(config: Config) -> Subject:
    loader = loaders(config)[0]
    if len(loader.data) < config.data.batch_size:
        raise ConfigError(
            f"data.batch_size: {config.data.batch_size} samples make a batch, but there are only {len(loader.data)}"
        )
    if config.run.precision == "fp16":
        # Not all of those that are compared scale their loss.
        raise ConfigError('run.precision: throughput is compared in "fp32" or "bf16", got "fp16"')
    return Subject(
        model=partial(build_model, config, model_options(config, loader)),
        batch=partial(_given, loader.batch(0, 0)),
        loss_fn=config.loss_fn(),
        optimizer=config.optimizer_factory(),
        precision=config.run.precision,
    )


def _given(batch: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
    return batch


def _table(rows: Sequence[Row]) -> Table:
    heads = ("system", "method", "ranks", "threads", "samples/s", "ratio", "slowest .. fastest", "of limit", "peak MB")
    return Table(heads, tuple(_cells(row) for row in rows), left=(0, 1))


def _cells(row: Row) -> tuple[str, ...]:
    def text(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    low, high = row.spread or (None, None)
    return (
        row.system,
        row.method,
        str(row.ranks),
        str(row.threads),
        text(row.samples_per_s, ",.0f"),
        text(row.ratio, ".2f"),
        "-" if low is None else f"{low:.2f} .. {high:.2f}",
        text(row.limit, ".2f"),
        text(row.peak_bytes and row.peak_bytes / 1e6, ",.0f"),
    )
