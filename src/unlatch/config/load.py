"""From a TOML file and overrides to a checked `Config`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import ValidationError

from ..errors import ConfigError
from ..problems import explain
from .sections import Config, sections

__all__ = ["Judge", "from_mapping", "load", "values_of"]

#: Says what is wrong with a name and options, one line each.
Judge: TypeAlias = Callable[[str, Mapping[str, Any]], list[str]]

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
    return from_mapping(values_of(path, overrides), "settings" if path is None else str(path))


def values_of(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a file says, with overrides applied, as it is: nothing is checked, no default filled in.

    >>> values_of(None, ["run.stages=4"])
    {'run': {'stages': 4}}
    """
    return _override({} if path is None else _read(Path(path)), overrides)


def from_mapping(
    values: Mapping[str, Any], source: str = "settings", judges: Mapping[str, Judge] | None = None
) -> Config:
    """Check settings that are already in Python.

    **Arguments:**

    - `source`: the name used in errors.
    - `judges`: by section, who knows which names there are and which options each takes.

    >>> from_mapping({"model": {"name": "mlp"}}).data.name
    'digits'
    """
    if not _within(values, _LEVELS):
        raise ConfigError(f"{source}: tables or lists {_LEVELS} levels deep; expected sections with keys")
    problems = [line for section, judge in (judges or {}).items() for line in _judged(section, values, judge)]
    try:
        config = Config.model_validate(dict(values))
    except ValidationError as error:
        problems = [*explain(error, Config), *problems]
    if problems:
        raise ConfigError("\n  ".join([f"{source}:", *problems]))
    return config


def _judged(section: str, values: Mapping[str, Any], judge: Judge) -> list[str]:
    """What a judge says about a section, unless it has no name to judge, which is a problem of another kind."""
    known, table = sections()[section].model_fields, values.get(section, {})
    name = table.get("name", known["name"].default) if isinstance(table, Mapping) else None
    if not isinstance(name, str):
        return []
    inside = "options" in known
    options = table.get("options", {}) if inside else {key: table[key] for key in table if key not in known}
    return [f"{section}: {problem}" for problem in judge(name, options)] if isinstance(options, Mapping) else []


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
