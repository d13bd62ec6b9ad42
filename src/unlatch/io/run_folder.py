"""The folder of a run: one place for the settings, versions, metrics, events and checkpoints of one training run.

runs/dtrp-3/
  config.toml       resolved settings (config-2.toml ... if a continued run changed them)
  versions.json     software, platform, threads
  metrics.jsonl     numbers over the run, see `metrics`
  metrics.csv
  last/             the newest checkpoint
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .versions import versions

__all__ = ["RunFolder"]

_MARK = "versions.json"


@dataclass(frozen=True)
class RunFolder:
    """A run's folder that exists and may be written to. Make one with `new`, `at` or `resume`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     [RunFolder.new("dtrp", root).path.name for _ in range(2)]
    ['dtrp-1', 'dtrp-2']
    """

    path: Path

    @classmethod
    def new(cls, name: str, root: str | Path = "runs") -> RunFolder:
        """The next free `root/name-n`, also when several runs start at once."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
        Path(root).mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = Path(root) / f"{plain}-{number}"
            try:
                path.mkdir()
                return cls(path)
            except FileExistsError:
                number += 1

    @classmethod
    def at(cls, path: str | Path, *, overwrite: bool = False) -> RunFolder:
        """A folder the user chose. It must be empty, unless `overwrite` may delete an earlier run in it."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path}: is a file; expected a folder for the run")
        if path.is_dir() and any(path.iterdir()):
            if not overwrite:
                raise ConfigError(
                    f"{path}: is not empty; choose another folder, or continue that run with --resume, "
                    "or delete it with --overwrite"
                )
            if not (path / _MARK).is_file():
                raise ConfigError(f"{path}: holds something other than a run, so it is not overwritten; choose another")
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def resume(cls, path: str | Path) -> RunFolder:
        """The folder of an earlier run, to continue it."""
        path = Path(path)
        if not (path / _MARK).is_file():
            raise ConfigError(f"{path}: no run to continue there; expected a folder with {_MARK}")
        return cls(path)

    def describe(self, config_toml: str, extra: Mapping[str, Any] | None = None) -> None:
        """Write settings and versions; a continued run with other settings keeps both, the newer with a number."""
        (self.path / _MARK).write_text(json.dumps({**versions(), **(extra or {})}, indent=1) + "\n", encoding="utf-8")
        previous, file = None, self.path / "config.toml"
        for number in itertools.count(2):
            if not file.exists():
                break
            previous, file = file.read_text(encoding="utf-8"), self.path / f"config-{number}.toml"
        if config_toml != previous:
            file.write_text(config_toml, encoding="utf-8")
