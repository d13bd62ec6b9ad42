"""What methods with auxiliary variables tell of a run: what happens at their borders, and their speed-up formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from ..nn.auxiliary import Capacity
from ..schedule.layer_parallel import LayerParallelTimes

__all__ = ["MEASURES", "StageMeasured", "border_metrics", "border_summary", "layer_parallel_times"]

#: What is measured at a border, with `lam` the predicted input there, `x` the state that arrives, `p` the gradient on
#: the input and `g` the seed of the stage below.
MEASURES = {
    "violation": "distance of the predicted input from the arriving state, |lam - x| / |x|",
    "jump": "distance of the gradient on the input from the seed of the stage below, |p - g| / |p|",
    "multiplier": "norm of the multiplier",
    "loss": "loss of what predicts the input (psi)",
    "cosine": "cosine with the gradient of backpropagation",
}

_SERIAL = ("forward", "backward", "update")


class StageMeasured(Protocol):
    """What is read of the statistics of one stage (`unlatch.runtime.local_statistics.LocalStatistics`)."""

    @property
    def stage(self) -> int:
        """Its number."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Time spent, by part of the work."""

    @property
    def batches(self) -> int:
        """Handled in that time."""

    @property
    def records(self) -> Sequence[Any]:
        """Measurements at its border, oldest first."""

    @property
    def cosines(self) -> Sequence[tuple[int, float, float]]:
        """Update, cosine with backpropagation's gradient, ratio of norms."""

    @property
    def capacity(self) -> Capacity | None:
        """Of its auxiliary network."""


def border_metrics(measured: Sequence[StageMeasured], after: int = -1) -> list[dict[str, float]]:
    """One row of numbers per update after `after` at which something was measured, oldest first.

    >>> from unlatch.runtime.border_records import BorderRecord
    >>> from unlatch.runtime.local_statistics import LocalStatistics
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


def border_summary(measured: Sequence[StageMeasured], data: float, step: float | None) -> dict[str, Any]:
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


def layer_parallel_times(measured: Sequence[StageMeasured], data: float = 0.0) -> LayerParallelTimes:
    """The terms of the speed-up formula, per batch, from what every stage measured.

    **Arguments:** `data`: seconds per batch to load and send it.

    >>> from unlatch.runtime.local_statistics import LocalStatistics
    >>> stages = [LocalStatistics(k, {"forward": 1.0, "backward": 2.0, "aux_forward": 0.5 * k}, 4, 2) for k in (0, 1)]
    >>> times = layer_parallel_times(stages)
    >>> times.forward, times.backward, times.aux_forward, times.step(2)
    (1.0, 2.0, 0.25, 1.75)
    """

    def seconds(*parts: str) -> list[float]:
        return [sum(s.seconds.get(part, 0.0) for part in parts) / max(1, s.batches) for s in measured]

    # What backpropagation does not have and no auxiliary network does: border losses, trial backwards, echoes.
    known = {*_SERIAL, "aux_forward", "aux_backward"}
    others = sorted({part for s in measured for part in s.seconds} - known)
    return LayerParallelTimes(
        data=data,
        forward=sum(seconds("forward")),
        backward=sum(seconds("backward", "update")),
        border=max(seconds(*others)),
        aux_forward=max(seconds("aux_forward")),
        aux_backward=max(seconds("aux_backward")),
    )
