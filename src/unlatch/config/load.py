"""From a TOML file and overrides to a checked `Config`."""

from __future__ import annotations

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

#: Sections, keys, and tables and lists in them; far more than anything that is set.
_LEVELS = 32


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
    if not _within(values, _LEVELS):
        raise ConfigError(f"{source}: tables or lists {_LEVELS} levels deep; expected sections with keys")
    try:
        return Config.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("\n  ".join([f"{source}:", *explain(error, Config)])) from None


def _within(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels > 0 and all(_within(one, levels - 1) for one in inner)


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
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}; expected a TOML file with settings") from None
    try:
        return _decoded(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}{_quote(text, str(error))}") from None


def _decoded(text: str) -> dict[str, Any]:
    """TOML as Python; whatever is wrong with it is a `TOMLDecodeError`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("lists or tables nested too deeply") from None
    except ValueError:
        raise tomllib.TOMLDecodeError("a number with thousands of digits") from None


def _quote(text: str, message: str) -> str:
    found = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    if found is None or int(found[1]) > len(lines):
        return ""
    return f"\n  {found[1]} | {lines[int(found[1]) - 1]}"


def _override(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        key, equals, text = override.partition("=")
        path = [part.strip() for part in key.split(".")]
        if not equals or len(path) < 2 or not all(path):
            raise ConfigError(f"override {override!r}: expected section.key=value, as in optimizer.lr=0.05")
        table = values
        for depth, part in enumerate(path[:-1], start=1):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"override {override!r}: {'.'.join(path[:depth])} is a value, not a section")
        table[path[-1]] = _parse(text.strip())
    return values


def _parse(text: str) -> Any:
    try:
        parsed = _decoded(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break could smuggle in further keys; then it is text.
    return parsed["value"] if set(parsed) == {"value"} else text
