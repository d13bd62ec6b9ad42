"""What all benchmarks share: options, result files, and the timing of `unlatch.throughput`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unlatch.io.versions import versions
from unlatch.throughput.timing import WARM, completions, interleave, spread, steady_seconds

__all__ = ["RESULTS", "WARM", "completions", "interleave", "options", "spread", "steady_seconds", "write"]

RESULTS = Path(__file__).parent / "results"


def options(doc: str | None, *, repeats: int, steps: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark that takes times."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats, help="interleaved rounds")
    parser.add_argument("--steps", type=int, default=steps, help="steps per round that count")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    return parser


def write(name: str, result: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Store a result with what it depended on."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"versions": versions(), **result}, indent=1) + "\n")
    return path
