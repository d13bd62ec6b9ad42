"""`unlatch compare`: run folders side by side, or all runs of a study, as a table and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from ..io.run_folder import names_apart
from .console import emit_json

if TYPE_CHECKING:
    from ..report.record import Record

__all__ = ["command"]


def command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...|STUDY.toml", help="Folders of finished runs, or one study.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page (comparison.html); of a study the folder (results, beside it)."),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Run or case that others are compared with; default: the first of bp.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Study: so many runs at once, without their speeds.")] = 1,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Study: run only this case; * stands for anything; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Study: list the runs that would be done.")] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Study: write down what the advisor expects, before any run.")
    ] = False,
    data_dir: Annotated[str | None, typer.Option(help="Study: where the data are; also UNLATCH_DATA.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as JSON; the page is written as well.")
    ] = False,
) -> None:
    """Compare runs by accuracy, speed, bubble, staleness and memory.

    \b
    unlatch compare runs/bp-1 runs/dtr-1
    unlatch compare runs/* -o report.html --baseline bp-1 --json
    unlatch compare study.toml --jobs 2
    unlatch compare study.toml --dry-run
    unlatch compare study.toml --predict

    A study is a file with settings and cases that differ from them. Its runs are done first: each leaves a line in
    results/NAME.jsonl, and the same command goes on after a stop or a kill.
    """
    if any(run.suffix == ".toml" for run in runs):
        if len(runs) > 1:
            raise ConfigError(f"a study is compared by itself, but {len(runs)} are named: {', '.join(map(str, runs))}")
        from .study import Request, conduct

        conduct(Request(runs[0], out, jobs, tuple(only or ()), dry_run, predict, baseline, data_dir, as_json))
        return
    if jobs > 1 or only or dry_run or predict or data_dir is not None:
        raise ConfigError(
            "--jobs, --only, --dry-run, --predict and --data-dir are for studies: name a TOML file with [study]"
        )
    _compare_folders(runs, out or Path("comparison.html"), baseline, as_json)


def _compare_folders(runs: list[Path], out: Path, baseline: str | None, as_json: bool) -> None:
    from ..report.comparison import comparison_table, rows_of
    from ..report.page import write_comparison
    from ..report.record import read_run

    groups = _labelled([read_run(folder) for folder in runs])
    if baseline is not None and baseline not in groups:
        raise ConfigError(f"--baseline {baseline!r} is none of the runs: {', '.join(groups)}")
    chosen = baseline or _default_baseline(groups)
    rows = rows_of(groups, chosen)
    if out.is_dir():
        raise ConfigError(f"{out}: is a folder; expected the name of the page")
    introduction = [] if chosen is None else [f"Ratios are to the speed of {chosen}."]
    introduction += [
        f"{label}: {remark}." for label, (record,) in groups.items() for remark in record.summary.get("remarks", ())
    ]
    write_comparison(out, f"{len(runs)} runs compared", introduction, groups, rows, first="run")
    if as_json:
        emit_json({"page": str(out), "baseline": chosen, "rows": [row.as_json() for row in rows]})
        return
    typer.echo(comparison_table(rows, "run").text())
    typer.echo(f"\n{f'ratio: to {chosen}; ' if chosen else ''}per stage: nearest the data first; page: {out}")


def _labelled(records: list[Record]) -> dict[str, list[Record]]:
    """Runs by the name of their folder."""
    labels = names_apart([record.folder for record in records])
    return {label: [record] for label, record in zip(labels, records, strict=True)}


def _default_baseline(groups: dict[str, list[Record]]) -> str | None:
    from ..methods import BASELINE

    for label, (record,) in groups.items():
        if record.summary["method"] == BASELINE and record.summary["processes"] == 1:
            return label
    return None
