"""What all tables share: how they look in Markdown, and the words of what was measured several times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


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


def median_text(one: dict[str, Any], digits: int = 2) -> str:
    return f"{one['median']:.{digits}f} ({one['min']:.{digits}f} to {one['max']:.{digits}f})"
