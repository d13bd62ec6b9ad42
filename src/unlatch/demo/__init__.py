"""`make demo`: one residual network, four systems beside the usual methods, two local processes, one table.

Handwritten digits that come with scikit-learn, so nothing is downloaded. Every method trains the same network several
times from different seeds, taking turns with plain backpropagation in one process, whose speed is the measure of all.
`entries` says what is trained, `turns` trains it, `words` says what came of it; `main` is all of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..io.versions import versions
from ..report.comparison import Row, comparison_table, rows_of
from ..report.page import write_comparison
from .entries import PROCESSES, chosen_entries, settings
from .turns import train_in_turns
from .words import closing_lines, introduction, sentence

__all__ = ["main", "settings"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print the table, write the report."""
    parser = argparse.ArgumentParser(prog="python -m unlatch.demo", description=(__doc__ or "").strip().split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for runs and report")
    parser.add_argument("--seeds", type=int, default=3, help="how often every method trains")
    parser.add_argument("--seconds", type=float, default=145.0, help="a seed that would end later is not begun")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--methods", help="some rows only: names separated by commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write rows and words as JSON")
    chosen = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        entries = chosen_entries(None if chosen.methods is None else chosen.methods.split(","))
    except ConfigError as error:
        parser.error(str(error))
    groups, notes = train_in_turns(entries, chosen.seeds, chosen.epochs, chosen.out, start + chosen.seconds)
    rows = rows_of(groups, {entry.label: entry.baseline for entry in entries})
    found = {row.label: row for row in rows}
    rows = [replace(row, sentence=sentence(entry, found, notes)) for entry, row in zip(entries, rows, strict=True)]
    seeds = max(len(records) for records in groups.values())
    before, after = introduction(seeds, chosen.epochs), closing_lines(entries, found)
    page = chosen.out / "report.html"
    title = f"Four systems beside the usual ones, on {PROCESSES} processes"
    write_comparison(page, title, before, groups, rows, figures=chosen.out / "figures", closing=after)
    seconds = time.perf_counter() - start
    if chosen.json is not None:
        command = " ".join(["python -m unlatch.demo", *_given(chosen)])
        facts = {"command": command, "seeds": seeds, "seconds": round(seconds, 1)}
        _write_json(chosen.json, {**facts, "introduction": before, "closing": after}, rows)
    print(f"\n{comparison_table(rows, sentences=False).text()}\n")
    print("\n".join(["What to see:", *(f"  {row.label}: {row.sentence}" for row in rows), "", *before]))
    print(f"\n{seconds:.0f} s; report: {page}, figures and runs beside it\n")
    print("\n".join(after), flush=True)


def _given(chosen: argparse.Namespace) -> list[str]:
    """Those arguments that make another experiment."""
    methods = [] if chosen.methods is None else [f"--methods {chosen.methods}"]
    return [f"--seeds {chosen.seeds}", f"--epochs {chosen.epochs}", *methods]


def _write_json(file: Path, facts: dict[str, Any], rows: Sequence[Row]) -> None:
    result = {"versions": versions(), **facts, "rows": [row.as_json() for row in rows]}
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
