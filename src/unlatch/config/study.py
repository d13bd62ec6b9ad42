"""A study: settings that all runs share, cases that differ from them, and seeds that every case is run with.

    [study]                                          # what is asked
    question = "Does delay cost accuracy?"
    seeds = 3
    [model]                                          # as in a settings file, for all runs
    name = "mlp"
    [[case]]                                         # what differs; lists span a grid
    label = "{method.name}, K={run.stages}"
    method.name = ["dtr", "fdg"]
    run.stages = [2, 4]
    baseline = "bp"                                  # another case than study.baseline to compare with

In a case a list is a grid, wherever it stands; a value that is a list itself has brackets of its own: `[["layers.2"]]`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from ..errors import ConfigError
from ..problems import explain, hint
from .load import Judge, from_mapping, values_of
from .sections import Config, Section

__all__ = ["Case", "PlannedRun", "Study", "load_study"]

_MOST_CASES = 1000
_SEEDS = Annotated[int, Field(ge=0, lt=2**63)]
_PLACE = re.compile(r"\{([^{}]*)\}")
_BRACKETS = "a list in a case spans a grid; a value that is a list itself needs brackets of its own: [[...]]"


class StudySettings(Section):
    """`[study]`: what is asked, how often each case is run, and what all cases are compared with."""

    name: str | None = None  # of the files that are written; that of the study file unless given
    question: str = ""
    seeds: tuple[_SEEDS, ...]  # or how many: 3 is [0, 1, 2]
    baseline: str | None = None  # a label; the first case of plain backpropagation unless given
    measure: str = "accuracy"  # the result of an evaluation that cases are compared by, as loss or perplexity
    probe: Annotated[int, Field(ge=0)] = 0  # updates between comparisons of gradients with backpropagation; 0: none
    recalibrate: Annotated[int, Field(ge=0)] = 0  # training batches for batch norm in a second evaluation; 0: none

    @field_validator("name")
    @classmethod
    def _file_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[\w][\w.-]{0,99}", name):
            raise ValueError(f"expected letters, digits, '-', '_' and '.', since files are called so, got {name!r}")
        return name

    @field_validator("seeds", mode="before")
    @classmethod
    def _seeds(cls, given: Any) -> Any:
        if isinstance(given, int) and not isinstance(given, bool):
            if not 0 <= given <= _MOST_CASES:
                raise ValueError(f"expected how many, at most {_MOST_CASES:,}, or a list of them, got {given}")
            given = list(range(given))
        if not isinstance(given, list | tuple):
            raise ValueError(f"expected how many, as in seeds = 3, or a list of them, got {given!r}")
        if not given:
            raise ValueError(
                "no seeds, so nothing would be run: expected at least 1, and 3 for anything to be a result"
            )
        if len(set(map(str, given))) < len(given):
            raise ValueError(f"a seed is listed twice in {list(given)}: the second run would be the first one again")
        return tuple(given)


class _StudyFile(Section):
    """What stands beside the cases and the settings of all runs."""

    study: StudySettings


@dataclass(frozen=True)
class Case:
    """One point of the grid: a label and checked settings, whose seed is that of the run.

    **Arguments:** `baseline`: the label of the case that it is compared with, if not that of the whole study.
    """

    label: str
    config: Config
    baseline: str | None = None


@dataclass(frozen=True)
class PlannedRun:
    """One run that a study asks for.

    **Arguments:**

    - `digest`: of everything that its numbers depend on; the same for the same settings, whatever they are called.
    - `labels`: of the cases that ask for it; more than one if they are the same.
    """

    digest: str
    labels: tuple[str, ...]
    seed: int
    config: Config

    @property
    def label(self) -> str:
        """The first one."""
        return self.labels[0]


@dataclass(frozen=True)
class Study:
    """A grid of runs. `load_study` reads it from a file."""

    name: str
    question: str
    seeds: tuple[int, ...]
    baseline: str | None
    measure: str
    probe: int
    recalibrate: int
    cases: tuple[Case, ...]

    def runs(self) -> list[PlannedRun]:
        """All runs, seed by seed, so that a study that is stopped has whole rounds; the same settings count once."""
        found: dict[str, PlannedRun] = {}
        for seed, case in itertools.product(self.seeds, self.cases):
            run = self.run_of(case, seed)
            labels = found[run.digest].labels if run.digest in found else ()
            found[run.digest] = replace(run, labels=(*labels, case.label))
        return list(found.values())

    def run_of(self, case: Case, seed: int) -> PlannedRun:
        """The run of one case with one seed."""
        config = _seeded(case.config, seed)
        return PlannedRun(self.digest(config), (case.label,), seed, config)

    def digest(self, config: Config) -> str:
        """What tells runs apart: all settings but where data and results are, and which way messages take."""
        # Results are the same whichever way that is, so those from before there was a choice stay valid.
        unseen = {"data": {"dir"}, "run": {"out", "transport"}}
        if not config.run.compile:
            # As are those from before stages could be compiled.
            unseen["run"].add("compile")
        values = config.model_dump(mode="json", exclude_none=True, exclude=unseen)
        text = json.dumps([values, self.probe, self.recalibrate], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_study(path: str | Path, judges: Mapping[str, Judge] | None = None, data_dir: str | None = None) -> Study:
    """Read a study and check every case of it.

    **Arguments:**

    - `judges`: as `from_mapping` takes them.
    - `data_dir`: where the data are, whatever the file says.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
    ...     _ = file.write('[study]\\nseeds = 3\\n[model]\\nname = "mlp"\\n[[case]]\\nlabel = "K={run.stages}"\\n')
    ...     _ = file.write('run.stages = [1, 2]')
    ...     file.flush()
    ...     study = load_study(file.name)
    >>> [case.label for case in study.cases], len(study.runs())
    (['K=1', 'K=2'], 6)
    """
    values = values_of(path, [] if data_dir is None else [f"data.dir={json.dumps(data_dir)}"])
    common = {key: value for key, value in values.items() if key not in ("study", "case")}
    settings, tables = _settings(path, values), _cases(path, values)
    if isinstance(common.get("run"), dict) and "seed" in common["run"]:
        raise ConfigError(f"{path}: run.seed: every run has one of study.seeds; move it there")
    cases = tuple(case for table in tables for case in _expanded(path, table, common, judges))
    _check_labels(path, cases, settings.baseline)
    name = settings.name or re.sub(r"[^\w.-]+", "-", Path(path).stem)
    rest = settings.model_dump(exclude={"name", "seeds"})
    return Study(name=name, seeds=settings.seeds, cases=cases, **rest)


def _settings(path: str | Path, values: Mapping[str, Any]) -> StudySettings:
    if "study" not in values:
        raise ConfigError(f"{path}: not a study: expected a section [study] with seeds, and a [[case]] for each case")
    try:
        return _StudyFile.model_validate({"study": values["study"]}).study
    except ValidationError as error:
        raise ConfigError("\n  ".join([f"{path}:", *explain(error, _StudyFile)])) from None


def _cases(path: str | Path, values: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tables = values.get("case")
    if not isinstance(tables, list) or not tables:
        raise ConfigError(f"{path}: nothing to compare: expected at least one [[case]] with a label")
    for number, table in enumerate(tables, start=1):
        label = table.get("label") if isinstance(table, Mapping) else None
        if not isinstance(label, str) or not label.strip():
            raise ConfigError(f'{path}: [[case]] number {number} has no label: expected text, as in label = "bp"')
    return tables


def _check_labels(path: str | Path, cases: Sequence[Case], baseline: str | None) -> None:
    labels = [case.label for case in cases]
    for case in cases:
        if case.baseline is not None and case.baseline not in labels:
            known = hint(case.baseline, labels)
            raise ConfigError(f"{path}, case {case.label!r}: baseline: there is no case {case.baseline!r}{known}")
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"{path}: two cases are called {label!r}; let the label say what differs, as in "
                '"{method.name}, K={run.stages}"'
            )
    if baseline is not None and baseline not in labels:
        raise ConfigError(f"{path}: study.baseline: there is no case {baseline!r}{hint(baseline, labels)}")


def _expanded(
    path: str | Path, table: Mapping[str, Any], common: Mapping[str, Any], judges: Mapping[str, Judge] | None
) -> Iterator[Case]:
    """All points of the grid that one `[[case]]` spans."""
    template = table["label"]
    against = table.get("baseline")
    if against is not None and not isinstance(against, str):
        raise ConfigError(f"{path}, case {template!r}: baseline: expected the label of a case, got {against!r}")
    changes = dict(_leaves({key: value for key, value in table.items() if key not in ("label", "baseline")}))
    grid = {key: value for key, value in changes.items() if isinstance(value, list)}
    for key, choices in grid.items():
        if not choices:
            raise ConfigError(f"{path}, case {template!r}: {'.'.join(key)} is an empty list, which spans no grid")
    if math.prod(len(choices) for choices in grid.values()) > _MOST_CASES:
        raise ConfigError(f"{path}, case {template!r}: spans more than {_MOST_CASES:,} cases")
    for point in itertools.product(*grid.values()):
        chosen = changes | dict(zip(grid, point, strict=True))
        values = _merged(common, chosen)
        label = _label(path, template, values, {key: chosen[key] for key in grid if len(grid[key]) > 1})
        if ("run", "seed") in chosen:
            raise ConfigError(f"{path}, case {label!r}: run.seed: every run has one of study.seeds; leave it out")
        try:
            config = from_mapping(values, f"{path}, case {label!r}", judges)
        except ConfigError as error:
            if any(".".join(key) in str(error) for key in grid):
                raise ConfigError(f"{error}\n  ({_BRACKETS})") from None
            raise
        yield Case(label, config, None if against is None else _label(path, against, values, {}))


def _leaves(table: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _merged(common: Mapping[str, Any], changes: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """The settings of a case. One that names a method begins with none of the common options, which are another's."""
    values: dict[str, Any] = _copied(common)
    if ("method", "name") in changes:
        values["method"] = {}
    for path, value in changes.items():
        table = values
        for part in path[:-1]:
            inner = table.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = table[part] = {}
            table = inner
        table[path[-1]] = value
    return values


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _label(path: str | Path, template: str, values: Mapping[str, Any], point: Mapping[tuple[str, ...], Any]) -> str:
    """The label with settings in place of their names; where it names none, what spans the grid is added."""
    if not _PLACE.search(template):
        return ", ".join([template, *(f"{key[-1]}={_text(value)}" for key, value in point.items())])

    def setting(match: re.Match[str]) -> str:
        found: Any = values
        for part in match[1].split("."):
            if not isinstance(found, Mapping) or part not in found:
                known = [".".join(key) for key, _ in _leaves(values)]
                raise ConfigError(
                    f"{path}: the label {template!r} names {match[1]!r}, which is set neither in the case nor for "
                    f"all{hint(match[1], known)}"
                )
            found = found[part]
        return _text(found)

    return _PLACE.sub(setting, template)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(_text, value)) if isinstance(value, list) else str(value)


def _seeded(config: Config, seed: int) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
