"""Numbers over the course of a run, written so that a crash loses at most the line being written.

Two files with the same content, both append-only: `metrics.jsonl` has one object per call, `metrics.csv` one row per
number (`step,time,name,value`), so its columns never change whatever is measured later. A spreadsheet or
`pandas.read_csv(...).pivot(index="step", columns="name", values="value")` gives one column per name.

Names are paths: `train/loss`, `eval/accuracy`, `stage2/delay`, `comm/bytes`, `mem/peak`.
"""

from __future__ import annotations

import csv
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Metrics", "read"]

_NAME = re.compile(r"[A-Za-z0-9_.@-]+(/[A-Za-z0-9_.@-]+)+")
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
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "metrics.csv"):
            _drop_unfinished_line(folder / name)
        rows = read(folder)
        self._start = time.monotonic() - (rows[-1]["time"] if rows else 0.0)
        self._step: int | None = None
        self._jsonl = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._csv = (folder / "metrics.csv").open("a", encoding="utf-8", newline="")
        self._rows = csv.writer(self._csv, lineterminator="\n")
        if self._csv.tell() == 0:
            self._rows.writerow(_COLUMNS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers and flush, so that they can be followed live and survive a crash."""
        if self._step is not None and step < self._step:
            raise ValueError(f"metrics at step {step} after step {self._step}: steps never fall")
        numbers = {name: _number(name, value) for name, value in values.items()}
        self._step = step
        seconds = round(time.monotonic() - self._start, 6)
        line = {"step": step, "time": seconds, **{name: _json(value) for name, value in numbers.items()}}
        self._jsonl.write(json.dumps(line, allow_nan=False) + "\n")
        self._jsonl.flush()
        self._rows.writerows((step, seconds, name, value) for name, value in numbers.items())
        self._csv.flush()

    def close(self) -> None:
        """Close both files; closing twice is harmless."""
        self._jsonl.close()
        self._csv.close()


def read(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, oldest first; a line that a crash cut off is left out.

    >>> read("nowhere")
    []
    """
    file = Path(folder) / "metrics.jsonl"
    if not file.exists():
        return []
    *whole, _ = file.read_text(encoding="utf-8").split("\n")
    return [{name: _from_json(value) for name, value in json.loads(line).items()} for line in whole]


def _number(name: str, value: Any) -> float:
    if not _NAME.fullmatch(name):
        raise ValueError(f"metric name {name!r}: expected a path such as train/loss or stage2/delay")
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)


def _json(value: float) -> float | str:
    # JSON has no infinities and no NaN, but a diverged loss is worth recording.
    return value if math.isfinite(value) else str(value)


def _from_json(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value


def _drop_unfinished_line(file: Path) -> None:
    if not file.exists():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        with file.open("r+b") as handle:
            handle.truncate(data.rfind(b"\n") + 1)
