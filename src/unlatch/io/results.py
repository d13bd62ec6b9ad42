"""Results of many runs in one file: a line of JSON each, written so that a kill at any moment loses none of them.

A line is on disk before the next run begins. What a kill leaves of a line that was being written is dropped when the
file is opened again. Whoever writes holds a lock on the file, which the system releases when the process ends, however
that comes about.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError

__all__ = ["Results", "read_results"]


class Results:
    """A file of results that this process alone may add to.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Results(Path(folder) / "a.jsonl") as results:
    ...         results.add({"accuracy": 0.5, "loss": math.nan})
    ...     read_results(Path(folder) / "a.jsonl")
    [{'accuracy': 0.5, 'loss': None}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path}: results cannot be written there: {error.strerror}") from None
        try:
            self._lock()
            self._mend()
            self.rows = read_results(path)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another process is writing results there now; wait for its end, stop it, or choose "
                "another folder with --out"
            ) from None
        except OSError:
            pass  # Some network file systems know no locks; a study is possible there all the same.

    def _mend(self) -> None:
        """Drop what a kill left of a last line; one that lacks nothing but its end stays."""
        written = self.path.read_bytes()
        *_, rest = written.rpartition(b"\n")
        if not rest:
            return
        if _row(rest) is not None:
            self._append(b"\n")
        else:
            self._file.truncate(len(written) - len(rest))

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a line, and come back when it is on disk. Numbers that JSON lacks become null."""
        plain = _finite(dict(row))
        self._append((json.dumps(plain, allow_nan=False) + "\n").encode())
        os.fsync(self._file.fileno())
        self.rows.append(plain)

    def _append(self, data: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            # A full disk must not leave half a line in front of the next one.
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Let others write to it."""
        self._file.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_results(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file, oldest first; none if there is no file. A last line that is still being written is left out.

    >>> read_results("nowhere.jsonl")
    []
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines[:-1], start=1):
        row = _row(line)
        if row is None:
            raise ConfigError(f"{path}, line {number}: expected a JSON object; was it edited? Delete the line to go on")
        found.append(row)
    return found


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
