"""What all tables share: how result files are read, how a table looks, and how numbers are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STUDIES = ROOT / "studies"


def result(name: str, results: Path) -> dict[str, Any] | None:
    """The result file of a benchmark; `None` if it has not been run."""
    path = results / f"{name}.json"
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found


def by_seed(
    runs: Iterable[Mapping[str, Any]], label: Callable[[Mapping[str, Any]], str], number: str = "accuracy"
) -> dict[str, dict[int, float]]:
    """A number of runs by what they are of, and by seed.

    >>> by_seed([{"of": "bp", "seed": 0, "accuracy": 97.0}], lambda run: run["of"])
    {'bp': {0: 97.0}}
    """
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(label(run), {})[run["seed"]] = run[number]
    return found


def sourced(text: str, commands: Iterable[str | None]) -> str:
    """A table and the commands that made its numbers, each once, as far as they are known.

    >>> sourced("...", ["a", None, "b", "a"])
    '...\\n\\nFrom `a`, `b`.'
    """
    told = ", ".join(f"`{command}`" for command in dict.fromkeys(commands) if command)
    return f"{text}\n\nFrom {told}." if told else text


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, *, prose: int = 0) -> str:
    """Markdown; the first `words` and the last `prose` columns are flush left.

    >>> print(table(["a", "b"], [["x", "1"]]))
    | a | b |
    |---|---:|
    | x | 1 |
    """
    rule = "".join("|---" if n < words or n >= len(heads) - prose else "|---:" for n in range(len(heads)))
    lines = ["| " + " | ".join(heads) + " |", rule + "|", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines)


def ratio_rows(found: dict[str, Any]) -> list[list[str]]:
    """Name, median and range of every ratio, the largest first."""
    ordered = sorted(found["ratio"].items(), key=lambda item: -item[1]["median"])
    return [[name, f"{r['median']:.2f}", f"{r['min']:.2f} to {r['max']:.2f}", str(r["repeats"])] for name, r in ordered]


def median_text(one: Mapping[str, float], digits: int = 2) -> str:
    """Median and range.

    >>> median_text({"median": 1.5, "min": 1.25, "max": 2.0})
    '1.50 (1.25 to 2.00)'
    """
    return f"{one['median']:.{digits}f} ({one['min']:.{digits}f} to {one['max']:.{digits}f})"
