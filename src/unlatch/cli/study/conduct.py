"""A study from its file to its page: the runs that are missing are done, a line of results each, then all is shown."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console

from ...config import Config
from ...config.study import PlannedRun, Study, load_study
from ...errors import ConfigError, Interrupted
from ...io import durable
from ...io.json_file import read_json
from ...io.results import Results, read_results
from ...lookup import also_searched, search_also
from ...problems import hint
from ...table import Table
from ..console import emit_json, people
from ..prepare import loaders, prepare
from ..settings import JUDGES
from .foretell import foretell
from .jobs import performed
from .progress import StudyProgress, duration_text, time_left
from .run import Job, samples

__all__ = ["Request", "conduct"]


@dataclass(frozen=True)
class Request:
    """The flags."""

    file: Path
    out: Path | None
    jobs: int
    only: tuple[str, ...]
    dry_run: bool
    predict: bool
    baseline: str | None
    data_dir: str | None
    as_json: bool


def conduct(request: Request) -> None:
    """Do what is missing of a study, then write its page and the files beside it."""
    search_also(request.file.parent)
    study = load_study(request.file, JUDGES, request.data_dir)
    _check(request, study)
    folder = request.out or request.file.parent / "results"
    wanted = _wanted(study, request.only)
    console = people(request.as_json)
    if request.dry_run:
        _announce(console, study, wanted, read_results(folder / f"{study.name}.jsonl"))
        return
    if request.predict:
        from ...report.study import baseline_of

        done = len(_settled(read_results(folder / f"{study.name}.jsonl")))
        compared = replace(study, baseline=request.baseline or baseline_of(study))
        foretell(compared, folder, done, _kept_command(request), console)
        return
    with Results(folder / f"{study.name}.jsonl") as results:
        missing = [run for run in wanted if run.digest not in _settled(results.rows)]
        console.print(f"{study.name}: {len(wanted) - len(missing)} of {len(wanted)} runs are done; {results.path}")
        try:
            _do(request, study, missing, results, console)
        except (KeyboardInterrupt, Interrupted) as request_to_stop:
            left = len([run for run in wanted if run.digest not in _settled(results.rows)])
            request_to_stop.add_note(f"{left} of {len(wanted)} runs are left; go on with: {command_of(request)}")
            raise
        rows = list(results.rows)
    asked = {run.digest for run in wanted}
    for row in rows:
        if row.get("digest") in asked:
            _check_measure(study, row)
    _show(request, study, folder, rows, console)


def command_of(request: Request) -> str:
    """What to type to have the same done."""
    words = ["unlatch", "compare", str(request.file)]
    flags: list[tuple[str, Any]] = [("--out", request.out), *(("--only", label) for label in request.only)]
    flags += [("--data-dir", request.data_dir), ("--jobs", request.jobs if request.jobs > 1 else None)]
    words += [str(word) for flag, value in flags if value is not None for word in (flag, value)]
    return shlex.join([*words, *(["--predict"] if request.predict else [])])


def _kept_command(request: Request) -> str:
    """The same for results, which others read: folders of this machine mean nothing to them."""
    return command_of(replace(request, out=None, data_dir=None if request.data_dir is None else "DIR"))


def _check(request: Request, study: Study) -> None:
    labels = [case.label for case in study.cases]
    if request.baseline is not None and request.baseline not in labels:
        raise ConfigError(f"--baseline: there is no case {request.baseline!r}; the cases are: {', '.join(labels)}")
    on_ranks = [case.label for case in study.cases if case.config.run.processes > 1]
    if request.jobs > 1 and on_ranks:
        raise ConfigError(
            f"--jobs {request.jobs} is for runs in one process, and {on_ranks[0]!r} has several: leave it out"
        )


def _wanted(study: Study, only: Sequence[str]) -> list[PlannedRun]:
    """The runs of cases that one of the patterns names; all if there is none."""
    runs = study.runs()
    for pattern in only:
        if not any(_named(run, pattern) for run in runs):
            raise ConfigError(
                f"--only: no case is called {pattern!r}; the cases are: {', '.join(c.label for c in study.cases)}"
            )
    return [run for run in runs if not only or any(_named(run, pattern) for pattern in only)]


def _named(run: PlannedRun, pattern: str) -> bool:
    return any(label == pattern or fnmatchcase(label, pattern) for label in run.labels)


def _settled(rows: list[dict[str, Any]]) -> set[str]:
    """What need not be done again: runs that came to their end or diverged. One that failed may do so no longer."""
    return {row["digest"] for row in rows if row.get("status") in ("finished", "diverged") and "digest" in row}


def _check_measure(study: Study, row: dict[str, Any]) -> None:
    """What a study compares by must be among what runs report; the first one that ends tells."""
    known = row.get("evaluation") or {}
    if row.get("status") == "finished" and study.measure not in known:
        names = ", ".join(name for name in known if name != "samples")
        raise ConfigError(
            f"study.measure: runs report no {study.measure!r}{hint(study.measure, known)}; there are: {names}. What "
            "has been run is kept: correct it and go on with the same command"
        )


def _announce(console: Console, study: Study, wanted: list[PlannedRun], rows: list[dict[str, Any]]) -> None:
    """What would be done."""
    done = _settled(rows)
    missing = [run for run in wanted if run.digest not in done]
    body = tuple(
        (" = ".join(run.labels), str(run.seed), run.digest, "done" if run.digest in done else "to do") for run in wanted
    )
    console.print(Table(("case", "seed", "digest", ""), body, left=(0, 2, 3)).text())
    seconds = time_left(missing, rows)
    takes = "" if seconds is None else f", about {duration_text(seconds)} one after the other"
    console.print(f"{len(missing)} of {len(wanted)} runs to do{takes}")


# ------------------------------------------------------------------------- runs


def _do(request: Request, study: Study, missing: list[PlannedRun], results: Results, console: Console) -> None:
    scratch = results.path.parent / f".{study.name}.runs"
    # Whatever a study that was killed has left; nobody else may be at it, since the results are locked.
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        for config in {run.config.data.model_dump_json(): run.config for run in missing}.values():
            samples(config)  # missing data are no fault of a run
        with StudyProgress(console, missing, results.rows, request.jobs) as progress:
            for _, row in performed(_jobs(request, study, missing, scratch, results.path), request.jobs):
                if row["status"] == "interrupted":
                    raise Interrupted(row["signal"])
                results.add({**row, "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
                progress.done(row)
                _check_measure(study, row)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _jobs(request: Request, study: Study, missing: list[PlannedRun], scratch: Path, results: Path) -> Iterator[Job]:
    cuts = _Cuts(results.with_suffix(".cuts.json"))
    for run in missing:
        key = {"study": study.name, "digest": run.digest, "label": run.label, "labels": run.labels, "seed": run.seed}
        shared = run.config.model_dump(
            mode="json", exclude_none=True, exclude={"run": {"seed", "out"}, "data": {"dir"}}
        )
        key |= {"settings": shared, "command": _kept_command(request), "jobs": request.jobs}
        config = cuts.applied(run.config)
        folder = str((scratch / run.digest).absolute())
        yield Job(key, config, folder, study.probe, study.recalibrate, tuple(also_searched()))


class _Cuts:
    """Where models are cut that are to be cut by measured times: measured once, so that all seeds have the same cut.

    **Arguments:** `file`: remembers them, so that a study that goes on does so with the same cuts.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, Any] = read_json(file, "file of cuts", ConfigError) if file.is_file() else {}

    def applied(self, config: Config) -> Config:
        """The settings with a cut by names, unless there is nothing to choose."""
        run = config.run
        if run.split != "auto" or run.stages == 1 or run.plan is not None:
            return config
        key = json.dumps(config.model_dump(mode="json", include={"model": True, "method": True, "run": {"stages"}}))
        if key not in self._known:
            try:
                self._known[key] = prepare(config, loaders(config, samples(config))[0]).plan.split
            except Exception:  # the run itself will say what is wrong
                return config
            durable.write_text(self._file, json.dumps(self._known, indent=1) + "\n")
        split = self._known[key]
        if split is None:
            return config
        return config.model_copy(update={"run": run.model_copy(update={"split": tuple(split)})})


# ------------------------------------------------------------------------ report


def _show(request: Request, study: Study, folder: Path, rows: list[dict[str, Any]], console: Console) -> None:
    from ...report.study import study_report
    from ...report.study_page import write_study

    whole = command_of(replace(request, only=()))
    report = study_report(study, rows, request.baseline, whole)
    page = write_study(report, folder / study.name)
    if request.as_json:
        emit_json({"page": str(page), "results": str(folder / f"{study.name}.jsonl"), **report.as_json()})
        return
    console.print(report.table.text())
    for note in report.notes:
        console.print(note)
    console.print(f"page: {page}")
