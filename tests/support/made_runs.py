"""Run folders without a run: what training would have written, made up, for pages and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unlatch.io.metrics import Metrics

WARM_UP, PAUSE, ROUND = 0.5, 0.3, 0.01


def made_events(stages: int = 2, rounds: int = 40, epochs: int = 2) -> list[dict[str, Any]]:
    """A slow first round, then rounds of equal length, with a pause for evaluation after each epoch."""
    events, now = [], 0.0
    for batch in range(rounds * epochs):
        length = WARM_UP if batch == 0 else ROUND
        for stage in range(stages):
            start = now + length * stage / (2 * stages)
            for kind, begin, end in (("F", 0.0, 0.2), ("B", 0.2, 0.45), ("U", 0.45, 0.48)):
                times = {"start": start + length * begin, "end": start + length * end}
                events.append({"stage": stage, "kind": kind, "batch": batch, "version": batch, **times, "bytes": 9})
        now += length + (PAUSE if (batch + 1) % rounds == 0 else 0.0)
    return sorted(events, key=lambda event: event["start"])


def write_run(
    folder: Path,
    *,
    method: str = "dtr",
    stages: int = 2,
    losses: Sequence[float] = (2.0, 1.0, 0.5, 0.25),
    accuracies: Sequence[float] = (0.5, 0.75, 0.9),
    speed: float = 1000.0,
    events: Sequence[dict[str, Any]] | None = None,
    measures: bool = False,
) -> Path:
    """Write a folder that `read_run` reads."""
    folder.mkdir(parents=True)
    stage = {"staleness": 1.0, "predicted_staleness": 1.0, "peak_bytes": 2_000_000, "weight_copies": 1, "bubble": 0.1}
    summary = {
        **{"status": "finished", "method": method, "processes": stages, "samples_per_second": speed, "bubble": 0.1},
        **{"accuracy": accuracies[-1] if accuracies else None, "measures": {"jump": "how <far>"} if measures else {}},
        "stages": [{**stage, "stage": number, "rank": number} for number in range(stages)],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "versions.json").write_text('{"unlatch": "0", "torch": "2", "cores": 2}')
    lines = made_events(stages) if events is None else events
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = Metrics(folder)
    for step, loss in enumerate(losses, start=1):
        log.log(step, {"train/loss": loss})
    for epoch, accuracy in enumerate(accuracies, start=1):
        log.log(len(losses), {"epoch/number": epoch, "eval/accuracy": accuracy, "eval/loss": 1 - accuracy})
        if measures:
            log.log(len(losses), {"measured/update": epoch, "border1/jump": 1 / epoch})
    log.close()
    return folder
