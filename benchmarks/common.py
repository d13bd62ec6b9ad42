"""What all benchmarks share: interleaved timing, result files, one thread."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unlatch.io.versions import versions

RESULTS = Path(__file__).parent / "results"


def interleave(candidates: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure each candidate once per round, for several rounds, so that a slow minute hits all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, measure in candidates.items():
            times[name].append(measure())
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median, best and worst."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def write(name: str, result: Mapping[str, Any]) -> Path:
    """Store a result with what it depended on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"versions": versions(), **result}, indent=1) + "\n")
    return path
