"""Tables of memory that was measured on ranks, and of what fits into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .common import table


def growth(found: dict[str, Any]) -> str:
    blocks = sorted({row["blocks"] for row in found["rows"]})
    methods = list(dict.fromkeys(row["method"] for row in found["rows"]))
    size = {(row["method"], row["blocks"]): row["activations"] for row in found["rows"]}
    heads = ["activations at the fuller rank, MB", *(f"{count} blocks" for count in blocks), "growth"]
    rows = [
        [name, *(f"{size[name, count] / 1e6:.1f}" for count in blocks), f"{found['growth'][name]:.2f}"]
        for name in methods
    ]
    return table(heads, rows)


def memory(found: dict[str, Any]) -> str:
    keys = [(row["depth"], row["stages"]) for row in found["rows"]]
    heads = ["fullest stage, MB (predicted over measured)", *(f"{d} layers, K={k}" for d, k in dict.fromkeys(keys))]
    cells: dict[str, dict[tuple[int, int], str]] = {}
    for row, key in zip(found["rows"], keys, strict=True):
        ratio = "" if row["ratio"] is None else f" ({row['ratio']:.2f})"
        cells.setdefault(row["method"], {})[key] = f"{max(row['measured']) / 1e6:.1f}{ratio}"
    rows = [[name, *(mine.get(key, "-") for key in dict.fromkeys(keys))] for name, mine in cells.items()]
    return table(heads, rows)


def largest(found: dict[str, Any]) -> str:
    rows = [[row["system"], str(row["blocks"]), row["note"]] for row in found["largest"]]
    limit = found["limit_bytes"] / 1e6
    return table([f"trains within {limit:.0f} MB per rank", "blocks", ""], rows)


#: Name of a table: the result file, and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "memory-petra": ("petra_memory", growth),
    "memory": ("memory_depth", memory),
    "largest-model": ("memory_depth", largest),
}
