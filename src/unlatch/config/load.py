"""From a TOML file and overrides to a checked `Config`."""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError
from .problems import explain
from .sections import Config

__all__ = ["from_mapping", "load"]


def load(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read settings from a file, then apply overrides.

    **Arguments:**

    - `path`: a TOML file, or `None` for the defaults.
    - `overrides`: `section.key=value`; the value as in TOML, text may go without quotes. The last one wins.

    **Returns:** the checked settings. Anything wrong is a `ConfigError` that names the file and the setting.

    >>> config = load(None, ["model.name=mlp", "optimizer.lr=0.05", "run.stages=4"])
    >>> config.model.name, config.optimizer.lr, config.run.stages
    ('mlp', 0.05, 4)
    """
    values = {} if path is None else _read(Path(path))
    return from_mapping(_override(values, overrides), "settings" if path is None else str(path))


def from_mapping(values: Mapping[str, Any], source: str = "settings") -> Config:
    """Check settings that are already in Python; `source` is the name used in errors.

    >>> from_mapping({"model": {"name": "mlp"}}).data.name
    'digits'
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("\n  ".join([f"{source}:", *explain(error, Config)])) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        # Editors on some systems begin UTF-8 files with a mark that TOML does not know.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; expected a TOML file with settings") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; expected a TOML file with settings") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}{_quote(text, str(error))}") from None


def _quote(text: str, message: str) -> str:
    found = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    if found is None or int(found[1]) > len(lines):
        return ""
    return f"\n  {found[1]} | {lines[int(found[1]) - 1]}"


def _override(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    result = copy.deepcopy(dict(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or len(path) < 2 or not all(path):
            raise ConfigError(f"override {override!r}: expected section.key=value, as in optimizer.lr=0.05")
        table = result
        for depth, part in enumerate(path[:-1], start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {'.'.join(path[:depth])} is a value, not a section")
        table[path[-1]] = _parse(text.strip())
    return result


def _parse(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break could smuggle in further keys; then it is text.
    return parsed["value"] if set(parsed) == {"value"} else text
