"""Numbers over the course of a run, written so that a crash loses at most the line being written.

Two files with the same content, both append-only: `metrics.jsonl` has one object per call, `metrics.csv` one row per
number (`step,time,name,value`), so its columns never change whatever is measured later. A spreadsheet or
`pandas.read_csv(...).pivot(index="step", columns="name", values="value")` gives one column per name.

Names are paths: `train/loss`, `eval/accuracy`, `stage2/delay`, `comm/bytes`, `mem/peak`.

A run is worth more than its numbers: where they cannot be written (the disk is full), they are dropped with one warning
and training goes on.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ..errors import ConfigError
from . import durable

__all__ = ["Metrics", "Tail", "read", "rewind"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_.@-]+(/[A-Za-z0-9_.@-]+)+")
_LONGEST = 200
_COLUMNS = ("step", "time", "name", "value")


class Metrics:
    """Where a run writes its numbers: JSONL and CSV in a folder.

    Opening a folder that has metrics continues them, and time goes on from the last line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     metrics = Metrics(folder)
    ...     metrics.log(1, {"train/loss": 2.5})
    ...     metrics.close()
    ...     [(row["step"], row["train/loss"]) for row in read(folder)]
    [(1, 2.5)]
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in ("metrics.jsonl", "metrics.csv"):
                _drop_unfinished_line(folder / name)
            rows = read(folder)
            self._jsonl, self._csv = _Lines(folder / "metrics.jsonl"), _Lines(folder / "metrics.csv")
        except OSError as error:
            raise ConfigError(f"{folder}: metrics cannot be written there: {error.strerror}") from error
        self._start = time.monotonic() - (rows[-1]["time"] if rows else 0.0)
        self._step: int | None = None
        self._warned = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers and flush, so that they can be followed live and survive a crash."""
        if self._step is not None and step < self._step:
            raise ValueError(f"metrics at step {step} after step {self._step}: steps never fall")
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._step = step
        seconds = round(time.monotonic() - self._start, 6)
        line = {"step": step, "time": seconds, **{name: _json(value) for name, value in numbers.items()}}
        rows = [(step, seconds, name, value) for name, value in numbers.items()]
        try:
            self._jsonl.append(json.dumps(line, allow_nan=False) + "\n")
            self._csv.append(_as_csv(rows if self._csv.end else [_COLUMNS, *rows]))
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s: %s; numbers from step %d on are lost until there is room, and training goes on",
                    *(self._jsonl.path.parent, error.strerror, step),
                )
            self._warned = True

    def close(self) -> None:
        """Close both files; closing twice is harmless."""
        self._jsonl.close()
        self._csv.close()


class _Lines:
    """A file that grows by whole lines: one that does not fit leaves no trace, and a later one may fit again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self.end = self._file.tell()

    def append(self, text: str) -> None:
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self.end)
            raise
        self.end = self._file.tell()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


def _as_csv(rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, oldest first; a line that a crash cut off is left out.

    >>> read("nowhere")
    []
    """
    file = Path(folder) / "metrics.jsonl"
    if not file.exists():
        return []
    try:
        *whole, _ = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    return [_parsed(line, f"{file}, line {number}") for number, line in enumerate(whole, start=1)]


class Tail:
    """The metrics of a run that may still be writing them: each look reads only what is new.

    **Arguments:** `folder`: of the run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     metrics, tail = Metrics(folder), Tail(folder)
    ...     metrics.log(1, {"train/loss": 2.5})
    ...     first = len(tail.look())
    ...     metrics.log(2, {"train/loss": 2.25})
    ...     metrics.close()
    ...     first, len(tail.look())
    (1, 2)
    """

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / "metrics.jsonl"
        self._rows: list[dict[str, Any]] = []
        self._read = 0
        self._file: tuple[int, int] | None = None

    def look(self) -> list[dict[str, Any]]:
        """All lines that are whole by now, oldest first. The list grows; after a `rewind` it is another one."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._file or found.st_size < self._read:
                    self._rows, self._read, self._file = [], 0, (found.st_dev, found.st_ino)
                file.seek(self._read)
                *whole, _ = file.read().split(b"\n")
        except FileNotFoundError:
            self._rows, self._read, self._file = [], 0, None
            return self._rows
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror}") from error
        for line in whole:
            self._rows.append(_parsed(line, f"{self._path}, line {len(self._rows) + 1}"))
            self._read += len(line) + 1
        return self._rows


def rewind(folder: str | Path, step: int, epochs: int) -> list[dict[str, Any]]:
    """Drop what was written after a checkpoint, since a run that continues from it writes the same again.

    **Arguments:** `step`, `epochs`: those that were complete; the end of a later epoch may be of the same step.

    **Returns:** the lines that stay.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     metrics = Metrics(folder)
    ...     for step in (1, 2, 3):
    ...         metrics.log(step, {"train/loss": 2.5})
    ...     metrics.close()
    ...     [row["step"] for row in rewind(folder, step=2, epochs=0)] == [row["step"] for row in read(folder)] == [1, 2]
    True
    """
    rows, folder = read(folder), Path(folder)
    later = (n for n, row in enumerate(rows) if row["step"] > step or row.get("epoch/number", 0) > epochs)
    first = next(later, len(rows))
    if first < len(rows):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        durable.write_text(folder / "metrics.jsonl", "".join(lines[:first]))
        # Made anew: a process that was killed, or a full disk, may have left it shorter than the other file.
        durable.write_text(folder / "metrics.csv", _as_csv([_COLUMNS, *_cells(rows[:first])] if first else []))
    return rows[:first]


def _cells(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        yield from ((row["step"], row["time"], name, row[name]) for name in row if name not in ("step", "time"))


def _from_json(value: Any) -> Any:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("more digits than any counter has")
    return value


class _Line(BaseModel):
    """One line of `metrics.jsonl`: step, time and numbers by name."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Annotated[int | float, BeforeValidator(_from_json)]]

    step: Annotated[int, Field(ge=0, lt=2**63)]
    time: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _named(self) -> _Line:
        for name in self.__pydantic_extra__:
            if len(name) > _LONGEST or not _NAME.fullmatch(name):
                raise ValueError(f"{name!r:.60} is no name of a metric")
        return self


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        return _Line.model_validate_json(line).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = f"{first['loc'][0]}: " if first["loc"] else ""
        raise ConfigError(f"{where}: {place:.60}{first['msg']}; was it cut off or edited?") from None


def _number(name: str, value: Any) -> float:
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r}: expected a path such as train/loss or stage2/delay")
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)


def _json(value: float) -> float | str:
    # JSON has no infinities and no NaN, but a diverged loss is worth recording.
    return value if math.isfinite(value) else str(value)


def _drop_unfinished_line(file: Path) -> None:
    if not file.exists():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        with file.open("r+b") as handle:
            handle.truncate(data.rfind(b"\n") + 1)
