"""Settings from a file and the flags that override it; flags are short for `--set`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import Config, from_mapping, load
from ..methods import get

__all__ = ["read_settings", "with_method", "with_run"]


def read_settings(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    method: str | None = None,
    data_dir: str | None = None,
    **run: Any,
) -> tuple[Config, list[str]]:
    """Read a file and apply flags.

    **Arguments:**

    - `overrides`: as given to `--set`.
    - `method`: another method than the file's; options that it does not know are dropped.
    - `data_dir`: where the data are.
    - `run`: keys of the section `[run]`; `None` leaves them as they are.

    **Returns:** the settings, and what to tell the user about them.

    >>> config, notes = read_settings(None, ["model.name=mlp"], method="dtr", stages=2)
    >>> config.method.name, config.run.stages
    ('dtr', 2)
    """
    flags = [f"run.{key}={value!r}" for key, value in run.items() if value is not None]
    if data_dir is not None:
        flags.append(f"data.dir={_quoted(data_dir)}")
    # Together, because one flag alone (more processes than the file's stages) may contradict the file.
    config = load(path, [*flags, *overrides])
    return (config, []) if method is None else with_method(config, method)


def with_method(config: Config, name: str) -> tuple[Config, list[str]]:
    """The same settings with another method, without options that only the old one knows.

    >>> config, notes = with_method(load(None, ["model.name=mlp", "method.name=dtrp", "method.compensate=2"]), "bp")
    >>> config.method.options, notes
    ({}, ['bp has no option compensate: dropped what the settings say for dtrp'])
    """
    if name == config.method.name:
        return config, []
    known = type(get(name)).__dataclass_fields__
    kept = {key: value for key, value in config.method.options.items() if key in known}
    dropped = [key for key in config.method.options if key not in known]
    values = config.model_dump(exclude_none=True) | {"method": {"name": name, **kept}}
    notes = [f"{name} has no option {key}: dropped what the settings say for {config.method.name}" for key in dropped]
    return from_mapping(values), notes


def with_run(config: Config, **run: Any) -> Config:
    """The same settings with other values in `[run]`, checked again.

    >>> with_run(load(None, ["model.name=mlp"]), seed=3).run.seed
    3
    """
    values = config.model_dump(exclude_none=True)
    return from_mapping(values | {"run": values["run"] | run})


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
