"""Writes the tables of README.md and docs/ from the result files of `benchmarks/` and `studies/`, between markers.

    python docs/write_tables.py [--check]

A page says `<!-- table: speed -->`, and what follows up to `<!-- end of table -->` is this script's. With `--check`
nothing is written, and the exit code is 1 if a page and its results disagree; `tests/test_tables.py` asks the same.
A benchmark that has not been run yet leaves a line that says how to run it. `<!-- table: study-NAME -->` is what the
study `studies/NAME.toml` found; `<!-- table: answer-NAME -->` says what that means for its question,
`<!-- table: foretold-NAME -->` how it compares with what `unlatch compare studies/NAME.toml --predict` had written down
before, `<!-- table: printed-NAME -->` what the library says of that, and `<!-- table: grid-NAME -->` has the
differences to the baselines only, by what labels begin with (columns) and go on with (rows).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import paper_claims
from result_tables import accuracy, memory, simulated, speeds
from result_tables.accuracy import PAIRS, pairs
from result_tables.common import RESULTS, ROOT, result, sourced, table
from result_tables.decisions import decisions
from result_tables.methods import method_table
from result_tables.speeds import split_pays
from result_tables.studies import STUDY_TABLES, digits

from unlatch.io.results import read_results

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end of table -->", re.S)


def paper(name: str, results: Path) -> str:
    """A paper's tables and figures beside ours, with verdicts."""
    return table(paper_claims.HEADS, paper_claims.paper(name, results), words=len(paper_claims.HEADS))


def paper_summary(results: Path) -> str:
    """How many tables and figures of each paper held."""
    return table(["rows of", *paper_claims.VERDICTS], paper_claims.summary(results))


#: Tables made of several result files.
COMBINED: dict[str, Callable[[Path], str]] = {
    "decisions": decisions,
    "methods": method_table,
    "accuracy-digits": digits,
    "paper-verdicts": paper_summary,
    **{f"paper-{name}": partial(paper, name) for name in paper_claims.PAPERS},
    "split-pays": split_pays,
}
#: Name of a table of one result file: the file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    **speeds.TABLES,
    **memory.TABLES,
    **accuracy.TABLES,
    **simulated.TABLES,
}


def _unrecorded(file: str, found: dict[str, Any]) -> str:
    """Where numbers come from whose file has no command: the script, and its settings if the file has these."""
    settings = found.get("settings", {}).items()
    told = ", ".join(f"{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in settings)
    return f"From `benchmarks/{file}.py`; no command is recorded{f', but its settings: {told}' if told else ''}."


def made(name: str, results: Path = RESULTS) -> str:
    """A table, with the command that its numbers come from."""
    for kind, make in STUDY_TABLES.items():
        if name.startswith(f"{kind}-"):
            return make(name.removeprefix(f"{kind}-"))
    if name in COMBINED:
        return COMBINED[name](results)
    if name not in TABLES and name not in PAIRS:
        raise SystemExit(f"there is no table {name!r}; known: {', '.join((*TABLES, *PAIRS, *COMBINED))}")
    file = TABLES[name][0] if name in TABLES else PAIRS[name][0]
    found = result(file, results)
    if found is None:
        return f"*Not measured yet: there is no result file `{file}.json`.*"
    if name in TABLES:
        text = TABLES[name][1](found)
    else:
        _, label, base = PAIRS[name]
        text = pairs(label, base, read_results(results / f"{file}.jsonl"), name.partition("-beside-")[2] or "bp")
    return sourced(text, [found["command"]]) if "command" in found else f"{text}\n\n{_unrecorded(file, found)}"


def rewritten(text: str, results: Path = RESULTS) -> str:
    """A page with all its tables made anew."""
    return MARKED.sub(lambda m: f"<!-- table: {m[1]} -->\n{made(m[1], results)}\n<!-- end of table -->", text)


def main() -> None:
    check, stale = "--check" in sys.argv[1:], []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(page)
            if not check:
                page.write_text(new, encoding="utf-8")
    for page in stale:
        print(f"{'disagrees with its results' if check else 'written'}: {page.relative_to(ROOT)}")
    raise SystemExit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
