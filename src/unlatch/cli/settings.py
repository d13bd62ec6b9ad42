"""Settings from a file and the flags that override it; flags are short for `--set`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from .. import data, methods, models
from ..config import Config, Judge, from_mapping, values_of
from ..errors import ConfigError, PlanError
from ..lookup import search_also
from ..methods import BASELINE, get
from ..methods.options import owner
from ..plan import Plan, read_plan

__all__ = ["JUDGES", "options_by_hand", "read_settings", "with_method", "with_run"]

#: Who knows the names in a section and their options.
JUDGES: dict[str, Judge] = {"model": models.problems, "data": data.problems, "method": methods.problems}


def read_settings(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    method: str | None = None,
    data_dir: str | None = None,
    plan: str | Path | None = None,
    judge_method: bool = True,
    **run: Any,
) -> tuple[Config, list[str]]:
    """Read a file and apply flags. What the file names as `package.module:function` is looked for beside it too.

    **Arguments:**

    - `overrides`: as given to `--set`; those of `[method]` are for the method that is chosen in the end.
    - `method`: another method than the file's; options that are not its own are dropped, with a note.
    - `data_dir`: where the data are.
    - `plan`: a file that `unlatch plan` wrote; says which method, and how many stages that begin where.
    - `judge_method`: whether the method and its options must be right; not if others are to take its place.
    - `run`: keys of the section `[run]`; `None` leaves them as they are.

    **Returns:** the settings, and what to tell the user about them.

    >>> config, notes = read_settings(None, ["model.name=mlp"], method="dtr", stages=2)
    >>> config.method.name, config.run.stages
    ('dtr', 2)
    """
    if plan is not None:
        return _with_plan(read_plan(plan, method), path, overrides, data_dir, run)
    overrides, named = _without_name(overrides)
    flags = [f"run.{key}={value!r}" for key, value in run.items() if value is not None]
    if data_dir is not None:
        flags.append(f"data.dir={_quoted(data_dir)}")
    if path is not None:
        search_also(Path(path).parent)
    # Together, because one flag alone (more processes than the file's stages) may contradict the file.
    values = values_of(path, [*flags, *overrides])
    chosen, table, notes = method or named, values.get("method", {}), list[str]()
    if chosen is not None and isinstance(table, dict):
        values["method"], notes = _of_method(table, chosen, options_by_hand(overrides))
    judges = {section: judge for section, judge in JUDGES.items() if judge_method or section != "method"}
    return from_mapping(values, "settings" if path is None else str(path), judges), notes


def options_by_hand(overrides: Sequence[str]) -> frozenset[str]:
    """The options of the method among overrides.

    >>> sorted(options_by_hand(["method.beta=0.5", "run.stages=2"]))
    ['beta']
    """
    keys = (override.partition("=")[0].strip() for override in overrides)
    return frozenset(key.split(".")[1] for key in keys if key.startswith("method."))


def _without_name(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """The overrides without `method.name`, which asks for another method as `--method` does; and that name."""
    naming = [override for override in overrides if override.partition("=")[0].strip() == "method.name"]
    kept = [override for override in overrides if override not in naming]
    return kept, naming[-1].partition("=")[2].strip().strip("\"'") if naming else None


def _with_plan(
    plan: Plan, path: str | Path | None, overrides: Sequence[str], data_dir: str | None, run: dict[str, Any]
) -> tuple[Config, list[str]]:
    processes, stages = run.pop("processes", None), _trainable(plan).busy_devices // plan.replication
    # A plan that says nothing of replicas is one for each of however many there are.
    planned = {"stages": stages, **({"replicas": plan.replication} if plan.replicas else {})}
    for name, count in planned.items():
        given = run.pop(name, None)
        if given not in (None, count):
            raise ConfigError(f"--{name} {given} contradicts the plan {plan.source}, which uses {count}: leave it out")
    config, notes = read_settings(path, overrides, method=plan.method, data_dir=data_dir, **run)
    devices = stages * planned.get("replicas", config.run.replicas)
    asked = config.run.processes if "processes" in config.run.model_fields_set else devices
    by_hand = options_by_hand(overrides)
    values = config.model_dump(exclude_none=True)
    values["method"] |= {key: value for key, value in plan.options.items() if key not in by_hand}
    values["run"] |= {
        **planned,
        "processes": min(asked, devices) if processes is None else processes,
        "split": "auto" if plan.split is None else plan.split,
    }
    if plan.tasks:
        values["run"]["plan"] = str(Path(plan.source).absolute())
    return from_mapping(values, f"settings with the plan {plan.source}", JUDGES), notes


def _trainable(plan: Plan) -> Plan:
    """The plan unless it is for analysis only, or for a method or options that there are not."""
    if plan.obstacle:
        raise PlanError(f"the plan file {plan.source} is for analysis only: {plan.obstacle}")
    try:
        get(plan.method, **plan.options)
    except (ConfigError, TypeError) as error:
        raise PlanError(f"the plan file {plan.source}: {error}") from None
    return plan


def with_method(config: Config, name: str, by_hand: Collection[str] = ()) -> tuple[Config, list[str]]:
    """The same settings with another method, without options that are not its own.

    An option of the same name is its own only if both methods have it from the same class: `weights` of fdg is a stash
    or the latest, `weights` of petra by default the current ones.

    **Arguments:** `by_hand`: options that are meant for the new method, whichever the old one was.

    >>> config, _ = read_settings(None, ["model.name=mlp", "method.name=dtrp", "method.compensate=2"])
    >>> config, notes = with_method(config, "bp")
    >>> config.method.options, notes
    ({}, ['bp has no option compensate: dropped what the settings say for dtrp'])
    """
    table, notes = _of_method(config.method.model_dump(), name, by_hand)
    return from_mapping(config.model_dump(exclude_none=True) | {"method": table}, judges=JUDGES), notes


def _of_method(table: dict[str, Any], name: str, by_hand: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """The section `[method]` with another name, without options that are not its own; and what was dropped."""
    old = table.get("name", BASELINE)
    before, after = _kind(old), _kind(name)
    # A name that is unknown is for the check of all settings to report.
    if old == name or after is None:
        return {**table, "name": name}, []
    kept, notes = {}, []
    for key, value in table.items():
        owned = owner(after, key)
        if key in by_hand or (owned is not None and before is not None and owned is owner(before, key)):
            kept[key] = value
        elif key != "name":
            has = f"has no option {key}" if owned is None else f"means something else by {key}"
            notes.append(f"{name} {has}: dropped what the settings say for {old}")
    return {**kept, "name": name}, notes


def _kind(name: object) -> type | None:
    """The class of a method; `None` if there is none of that name."""
    try:
        return type(get(name)) if isinstance(name, str) else None
    except ConfigError:
        return None


def with_run(config: Config, **run: Any) -> Config:
    """The same settings with other values in `[run]`, checked again.

    >>> with_run(read_settings(None, ["model.name=mlp"])[0], seed=3).run.seed
    3
    """
    values = config.model_dump(exclude_none=True)
    return from_mapping(values | {"run": values["run"] | run})


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
