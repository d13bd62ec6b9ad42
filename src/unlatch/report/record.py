"""What a run folder says about its run, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..io import metrics
from ..runtime.events import Event
from .measures import Measures, measures_of

__all__ = ["Record", "read_run"]

#: Enough for a picture of the beginning; a run may have recorded a hundred times as many.
_FEW = 4000


@dataclass(frozen=True)
class Record:
    """One finished run.

    **Arguments:**

    - `summary`: the last word on everything, as `summary.json` has it.
    - `losses`: training loss by step.
    - `epochs`: the numbers logged at the end of each epoch, by metric name.
    - `measures`: what the method measured of itself over the updates, if anything.
    - `events`: the first actions of all stages; times in seconds since the first.
    """

    folder: Path
    summary: Mapping[str, Any]
    losses: tuple[tuple[int, float], ...] = ()
    epochs: tuple[Mapping[str, Any], ...] = ()
    measures: Measures = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    versions: Mapping[str, Any] = field(default_factory=dict)


def read_run(folder: str | Path) -> Record:
    """Read a run folder.

    >>> read_run("nowhere")
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: nowhere: not a finished run; expected a folder with summary.json
    """
    folder = Path(folder)
    file = folder / "summary.json"
    if not file.is_file():
        raise ConfigError(f"{folder}: not a finished run; expected a folder with summary.json")
    rows = metrics.read(folder)
    return Record(
        folder=folder,
        summary=_json(file),
        losses=tuple((row["step"], row["train/loss"]) for row in rows if "train/loss" in row),
        epochs=tuple(row for row in rows if "epoch/number" in row),
        measures=measures_of(rows),
        events=tuple(islice(_events(folder / "events.jsonl"), _FEW)),
        versions=_json(folder / "versions.json") if (folder / "versions.json").is_file() else {},
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: not readable as JSON ({error}); was it cut off or edited?") from error
    return found


def _events(file: Path) -> Iterator[Event]:
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield Event(**json.loads(line))
