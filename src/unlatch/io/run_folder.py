"""The folder of a run: one place for the settings, versions, metrics, events and checkpoints of one training run.

runs/dtrp-3/
  config.toml       resolved settings (config-2.toml ... if a continued run changed them)
  versions.json     software, platform, threads
  metrics.jsonl     numbers over the run, see `metrics`
  metrics.csv
  checkpoints/      see `checkpoints`
  live/             what each rank did last, if the run is followed: see `callbacks.Live`

While a run writes into its folder it holds a lock on it, which the system releases when the process ends, however that
comes about: a second run is refused instead of mixing with the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import durable
from .versions import versions

__all__ = ["RunFolder", "checkpoints_in", "facts_of", "is_held", "is_run", "live_file", "names_apart", "settings_in"]

_MARK = "versions.json"
#: How often, and how many seconds apart, a lock is tried again.
_TRIES, _MOMENT = 10, 0.02


def is_run(path: str | Path) -> bool:
    """Whether a run was written to this folder."""
    return (Path(path) / _MARK).is_file()


def facts_of(path: str | Path) -> dict[str, Any]:
    """What `describe` wrote about a run; nothing if it cannot be read."""
    try:
        found = json.loads((Path(path) / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def checkpoints_in(path: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(path) / "checkpoints"


def names_apart(paths: Sequence[Path]) -> list[str]:
    """What to call each of some runs: the name of its folder, with as much of the path as tells them apart.

    >>> names_apart([Path("mine/dtr-1"), Path("yours/dtr-1")])
    ['mine/dtr-1', 'yours/dtr-1']
    """
    for depth in range(1, 8):
        names = ["/".join(path.resolve().parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("the same run folder is named twice")


def settings_in(path: str | Path) -> Path:
    """The settings a run was last continued with: `config-3.toml` rather than `config.toml`."""
    numbered = {int(name): file for file in Path(path).glob("config-*.toml") if (name := file.stem[7:]).isdigit()}
    return numbered[max(numbered)] if numbered else Path(path) / "config.toml"


def live_file(path: str | Path, rank: int) -> Path:
    """Where a rank tells what it does just now."""
    return Path(path) / "live" / f"rank{rank}.json"


def is_held(path: str | Path) -> bool | None:
    """Whether a run is writing to this folder now; `None` where the file system does not tell.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     with RunFolder.new("dtrp", root) as folder:
    ...         held = is_held(folder.path)
    ...     held, is_held(folder.path)
    (True, False)
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


class _Lock:
    """Holds a folder until it is released, forgotten, or the process ends."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _hold(self._descriptor)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"{folder}: another run is writing there now; wait for its end, stop it, or choose another folder"
            ) from None
        except OSError:
            # Some network file systems know no locks on folders; a run is possible there all the same.
            self.release()

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()


def _hold(descriptor: int) -> None:
    """Lock a folder. `is_held` has it for a moment, which is no reason to refuse a run."""
    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_MOMENT)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder that exists and may be written to. Make one with `new`, `at` or `resume`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     [RunFolder.new("dtrp", root).path.name for _ in range(2)]
    ['dtrp-1', 'dtrp-2']
    """

    path: Path
    _lock: _Lock = field(repr=False, compare=False)
    _made: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def new(cls, name: str, root: str | Path = "runs") -> RunFolder:
        """The next free `root/name-n`, also when several runs start at once."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name[:100]).strip("-.") or "run"
        with _refusing(root):
            Path(root).mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = Path(root) / f"{plain}-{number}"
                try:
                    path.mkdir()
                    break
                except FileExistsError:
                    continue
            return cls(path, _Lock(path), _made=True)

    @classmethod
    def at(cls, path: str | Path, *, overwrite: bool = False) -> RunFolder:
        """A folder the user chose. It must be empty, unless `overwrite` may delete an earlier run in it."""
        path = Path(path)
        with _refusing(path):
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path}: is a file; expected a folder for the run")
            made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            lock = _Lock(path)
            try:
                _make_empty(path, overwrite)
            except BaseException:
                # Not left to the garbage collector: the error may be kept, and with it whoever raised it.
                lock.release()
                raise
            return cls(path, lock, made)

    @classmethod
    def resume(cls, path: str | Path) -> RunFolder:
        """The folder of an earlier run, to continue it."""
        path = Path(path)
        with _refusing(path):
            if not is_run(path):
                raise ConfigError(f"{path}: no run to continue there; expected a folder with {_MARK}")
            return cls(path, _Lock(path))

    def describe(self, config_toml: str | None, extra: Mapping[str, Any] | None = None) -> None:
        """Write versions and settings, if there are any in a file; a continued run with other settings keeps both, the
        newer with a number."""
        with _refusing(self.path):
            text = json.dumps({**versions(), **(extra or {})}, indent=1) + "\n"
            durable.write_text(self.path / _MARK, text)
            if config_toml is None:
                return
            previous, file = None, self.path / "config.toml"
            for number in itertools.count(2):
                if not file.exists():
                    break
                previous, file = file.read_text(encoding="utf-8"), self.path / f"config-{number}.toml"
            if config_toml != previous:
                durable.write_text(file, config_toml)

    def discard(self) -> None:
        """Delete what was written to it, and the folder unless it was there before."""
        with _refusing(self.path):
            _empty(self.path)
            if self._made:
                self.path.rmdir()

    def release(self) -> None:
        """Let another run have the folder; the end of the process does the same."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextlib.contextmanager
def _refusing(path: str | Path) -> Iterator[None]:
    """What the system refuses is said in one line, with the folder that was asked for."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be the folder of a run: {reason}; choose another") from error


def _make_empty(folder: Path, overwrite: bool) -> None:
    """Delete the run in a folder, if that is allowed; the folder itself stays, with the lock on it."""
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise ConfigError(
            f"{folder}: is not empty; choose another folder, or continue that run with --resume (Trainer.resume), or "
            "delete it with --overwrite (overwrite=True)"
        )
    if not is_run(folder):
        raise ConfigError(f"{folder}: holds something other than a run, so it is not overwritten; choose another")
    _empty(folder)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
