"""What the advisor expects of every case of a study, written down before any of it is run."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ...config import Config
from ...config.study import Study
from ...errors import ConfigError
from ...io import durable
from ...io.versions import versions
from ...table import Table, number_text
from ..prepare import loaders, prepare
from .run import samples

__all__ = ["foretell", "foretold_file"]


def foretold_file(folder: Path, study: Study) -> Path:
    """Where it stands."""
    return folder / f"{study.name}.predicted.json"


def foretell(study: Study, folder: Path, done: int, command: str, console: Console) -> None:
    """Write it down, cases that are expected to lose least first.

    **Arguments:** `done`: runs of the study that have results, of which there must be none.
    """
    if done:
        raise ConfigError(
            f"--predict: {done} runs of {study.name} are done, so that it would be no prediction any more; ask for it "
            "before the first run, or choose a folder without results with --out"
        )
    rows = _ranked(list(_expected(study)))
    told = {
        "study": study.name,
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "command": command,
        "versions": versions(),
        "cases": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = foretold_file(folder, study)
    durable.write_text(file, json.dumps(told, indent=1) + "\n")
    heads = ("case", "optimizer", "updates late", "margin", "rank", "of all", "verdict")
    body = tuple(
        (
            row["case"],
            row["optimizer"],
            f"{row['updates_late']:.3g}",
            number_text(row["margin"], ".3f"),
            number_text(row["rank"], "g"),
            number_text(row["rank_of_all"], "g"),
            row["verdict"] or f"none: {row['unknown']}",
        )
        for row in rows
    )
    console.print(Table(heads, body, left=(0, 1, 6)).text())
    console.print(f"written to {file}; commit it before the runs")


def _expected(study: Study) -> Iterator[dict[str, Any]]:
    """Each case that is compared with another one: what is said to whoever trains it."""
    baselines = {case.baseline or study.baseline for case in study.cases}
    for case in study.cases:
        if case.label in baselines:
            continue
        prepared = prepare(case.config, loaders(case.config, samples(case.config))[0])
        advice = prepared.advice
        yield {
            "case": case.label,
            "digest": study.run_of(case, study.seeds[0]).digest,
            "optimizer": _optimizer(case.config),
            "method": prepared.method.call,
            "updates_late": max(advice.lateness) / advice.microbatches,
            "limit": advice.limit,
            "margin": advice.margin,
            "verdict": advice.verdict,
            "unknown": advice.unknown,
        }


def _optimizer(config: Config) -> str:
    """Which, and with which momentum: what cases are grouped by."""
    asked = config.optimizer
    betas = asked.options.get("betas")
    name = asked.name.rpartition(":")[2]
    momentum = asked.momentum if betas is None else betas[0]
    return name if momentum is None else f"{name} {momentum:g}"


def _ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """With their ranks, within the optimizer and over all: 1 is expected to lose least; equals share theirs."""

    def rank(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> float | None:
        if row["margin"] is None:
            return None
        margins: list[float] = [other["margin"] for other in others if other["margin"] is not None]
        better = [margin for margin in margins if margin > row["margin"]]
        return len(better) + (margins.count(row["margin"]) + 1) / 2

    for row in rows:
        row["rank"] = rank(row, [other for other in rows if other["optimizer"] == row["optimizer"]])
        row["rank_of_all"] = rank(row, rows)
    return sorted(rows, key=lambda row: (row["margin"] is None, row["rank_of_all"] or 0.0))


def _commit() -> str | None:
    """Of the folder that is worked in, if it is under version control."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
