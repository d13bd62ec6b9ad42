"""What the four papers state, table by table and figure by figure, beside what the result files of this project say.

`docs/write_tables.py` writes the tables of `docs/papers.md` with it. A claim has sources; a source reads result files
(`evidence`) and gives cases, each with its numbers and a verdict that follows from them by one of the `rules`, which
the page states. Nothing is judged by hand: another result file gives another verdict, and one that is missing says how
to make it. Each paper has a file of its claims; `claims` is what they share.
"""

from __future__ import annotations

from pathlib import Path

from .auxnet import AUXNET
from .claims import rows
from .dtr import DTR
from .evidence import Evidence
from .layerpipe import LAYERPIPE
from .petra import PETRA
from .rules import VERDICTS

__all__ = ["HEADS", "PAPERS", "VERDICTS", "paper", "summary"]

#: The tables of `docs/papers.md`.
PAPERS = {"dtr": DTR, "petra": PETRA, "layerpipe": LAYERPIPE, "auxnet": AUXNET}
HEADS = ("table or figure", "the paper's statement", "published", "ours", "verdict", "why")


def summary(results: Path) -> list[list[str]]:
    """How many rows of each paper came to what."""
    made = []
    for name in PAPERS:
        found = [row[4].strip("*").partition(":")[0] for row in paper(name, results)]
        made.append([name, *(str(found.count(verdict)) for verdict in VERDICTS)])
    return made


def paper(name: str, results: Path) -> list[list[str]]:
    """The rows of one paper, from a folder of results and the studies of the same tree."""
    return rows(PAPERS[name], Evidence(results, results.parents[1] / "studies"))
