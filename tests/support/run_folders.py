"""Folders as runs leave them, made by hand."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

STAGE = {"staleness": 1.0, "predicted_staleness": 1.0, "peak_bytes": 100, "weight_copies": 0, "bubble": 0.25}


def begin_run(folder: Path, losses: int = 0, epochs: int = 0) -> Path:
    """A run that has begun and says so many losses and epochs."""
    folder.mkdir(parents=True)
    (folder / "versions.json").write_text('{"unlatch": "0.1.0"}')
    (folder / "config.toml").write_text('[model]\nname = "mlp"\n[run]\nepochs = 5\n')
    for step in range(1, losses + 1):
        add_row(folder, step, {"train/loss": 2.0 / step})
    for number in range(1, epochs + 1):
        staged = {f"stage{n}/{name}": value for n in (0, 1) for name, value in STAGE.items()}
        add_row(folder, losses, {"epoch/number": number, "eval/accuracy": 0.5 + 0.1 * number, **staged})
    return folder


def add_row(folder: Path, step: int, numbers: dict[str, float]) -> None:
    plain = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 0.1 * step, **plain}) + "\n")


def sum_up(folder: Path, steps: int, status: str = "finished", **more: Any) -> None:
    """The end of a run."""
    stages = [{"stage": n, **STAGE} for n in (0, 1)]
    said = {"status": status, "method": "dtr", "processes": 2, "accuracy": 0.9, "samples_per_second": 100.0}
    said |= {"bubble": 0.25, "stages": stages, "steps": steps, "notes": [], **more}
    (folder / "summary.json").write_text(json.dumps(said))


def tell(folder: Path, rank: int, first: float = 1000.0, **more: Any) -> None:
    """What `callbacks.Live` writes on a rank whose stage takes 0.01 s for each of ten forwards."""
    events = [[rank, "F", n, 0, first + 0.02 * n, first + 0.02 * n + 0.01, 10] for n in range(10)]
    said = {"time": time.time(), "rank": rank, "ranks": 2, "restarts": 0, "method": "dtr", "method_in_full": "DTR()"}
    said |= {"measures": {}, "step": 12, "steps": 100, "epoch": 0, "epochs": 5, "samples_per_second": 640.0}
    said |= {"kinds": {"F": "forward"}, "notes": [], "ended": False, "error": None, "events": events}
    said |= {"stages": [{"stage": rank, "rank": rank, **STAGE}], **more}
    (folder / "live").mkdir(exist_ok=True)
    (folder / "live" / f"rank{rank}.json").write_text(json.dumps(said))
