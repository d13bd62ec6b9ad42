"""What methods with auxiliary variables tell of a run: what happens at their borders, and their speed-up formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..local.statistics import LocalStatistics, layer_parallel_times

__all__ = ["MEASURES", "border_metrics", "border_summary"]

#: What is measured at a border, with `lam` the predicted input there, `x` the state that arrives, `p` the gradient on
#: the input and `g` the seed of the stage below.
MEASURES = {
    "violation": "distance of the predicted input from the arriving state, |lam - x| / |x|",
    "jump": "distance of the gradient on the input from the seed of the stage below, |p - g| / |p|",
    "multiplier": "norm of the multiplier",
    "loss": "loss of what predicts the input (psi)",
    "cosine": "cosine with the gradient of backpropagation",
}


def border_metrics(measured: Sequence[LocalStatistics], after: int = -1) -> list[dict[str, float]]:
    """One row of numbers per update after `after` at which something was measured, oldest first.

    >>> from unlatch.methods.local.statistics import BorderRecord
    >>> stage = LocalStatistics(1, records=[BorderRecord(10, 0.5, 1.0, 0.0, 0.1)], cosines=[(10, 0.9, 1.0)])
    >>> border_metrics([stage])[0]["border1/violation"], border_metrics([stage], after=10)
    (0.5, [])
    """
    rows: dict[int, dict[str, float]] = {}
    for part in measured:
        for record in part.records:
            rows.setdefault(record.update, {}).update(record.metrics(part.stage))
        for update, cosine, _ in part.cosines:
            rows.setdefault(update, {})[f"stage{part.stage}/cosine"] = cosine
    return [{"measured/update": update, **rows[update]} for update in sorted(rows) if update > after]


def border_summary(measured: Sequence[LocalStatistics], data: float, step: float | None) -> dict[str, Any]:
    """The size of every AuxNet, and the speed-up formula with the measured terms.

    **Arguments:** `data`: seconds per batch to read it; `step`: measured seconds per batch.
    """
    stages = len(measured)
    times = layer_parallel_times(measured, data)
    took = "" if step is None else f"; a step of this run took {1e3 * step:.1f} ms"
    return {
        "auxnets": [
            {
                "stage": part.stage,
                **asdict(part.capacity),
                "parameter_ratio": part.capacity.parameter_ratio,
                "flop_ratio": part.capacity.flop_ratio,
            }
            for part in measured
            if part.capacity is not None
        ],
        "layer_parallel": {**times.summary(stages), "measured_step_seconds": step, "text": times.text(stages)},
        "remarks": [f"speed-up formula with the measured terms: {times.text(stages)}{took}"],
    }
