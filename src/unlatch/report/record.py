"""What a run folder says about its run, read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..config.problems import explain
from ..errors import ConfigError
from ..io import metrics
from ..io.json_file import read_json
from ..runtime.events import Event
from .measures import Measures, measures_of

__all__ = ["Record", "read_run"]

#: Enough for a picture; a run may have recorded a hundred times as many.
_FEW = 4000


Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]


class _Open(BaseModel):
    """What is read of a file; it may say more."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class _Stage(_Open):
    staleness: float
    predicted_staleness: float
    peak_bytes: Count
    weight_copies: Count
    reconstruction_error: float | None = None
    rank: Count = 0


class _Summary(_Open):
    method: str
    processes: Count
    accuracy: float | None
    samples_per_second: Annotated[float, Field(ge=0)] | None
    bubble: float | None
    stages: list[_Stage]
    remarks: list[str] = []
    measures: dict[str, str] = {}


class _Action(_Open):
    """An `Event` as a line of `events.jsonl`."""

    stage: Annotated[int, Field(ge=0, lt=100_000)]
    kind: str
    batch: int
    version: int
    start: Seconds
    end: Seconds
    bytes: int


@dataclass(frozen=True)
class Record:
    """One finished run.

    **Arguments:**

    - `summary`: the last word on everything, as `summary.json` has it.
    - `losses`: training loss by step.
    - `epochs`: the numbers logged at the end of each epoch, by metric name.
    - `measures`: what the method measured of itself over the updates, if anything.
    - `events`: actions of all stages from the middle of what was recorded; times in seconds since the first of all.
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
    summary = _object(file)
    _valid(_Summary, str(file), summary)
    rows = metrics.read(folder)
    return Record(
        folder=folder,
        summary=summary,
        losses=tuple((row["step"], row["train/loss"]) for row in rows if "train/loss" in row),
        epochs=tuple(row for row in rows if "epoch/number" in row),
        measures=measures_of(rows),
        events=tuple(_middle(folder / "events.jsonl")),
        versions=_object(folder / "versions.json") if (folder / "versions.json").is_file() else {},
    )


def _object(file: Path) -> dict[str, Any]:
    found = read_json(file, "file", ConfigError)
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(found).__name__}; was it edited?")
    return found


M = TypeVar("M", bound=_Open)


def _valid(model: type[M], source: str, data: Any) -> M:
    try:
        # Lines of events come as bytes.
        return model.model_validate_json(data) if isinstance(data, bytes) else model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error)[0]}; was it cut off or edited?") from None


def _middle(file: Path) -> Iterator[Event]:
    """The events around the middle: the first ones show how a run starts, not how it goes on."""
    if not file.is_file():
        return
    with file.open("rb") as lines:
        skipped = max(0, sum(1 for _ in lines) - _FEW) // 2
        lines.seek(0)
        for number, line in islice(enumerate(lines, start=1), skipped, skipped + _FEW):
            if line.endswith(b"\n"):
                yield Event(**dict(_valid(_Action, f"{file}, line {number}", line)))
