"""`unlatch compare`: run folders side by side, as a table and as a page."""

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
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("comparison.html"),
    baseline: Annotated[
        str | None, typer.Option(help="Run whose speed counts as 1; default: bp on one process, if there is one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as JSON; the page is written as well.")
    ] = False,
) -> None:
    """Compare runs by accuracy, speed, bubble, staleness and memory.

    \b
    unlatch compare runs/bp-1 runs/dtr-1
    unlatch compare runs/* -o report.html --baseline bp-1 --json
    """
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
