"""What a method with local losses measured about itself, stage by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..nn.auxiliary import Capacity
from .border_records import BorderRecord

__all__ = ["LocalStatistics"]


@dataclass(frozen=True)
class LocalStatistics:
    """One stage's measurements; those of its border are about its predicted input.

    **Arguments:**

    - `stage`: which.
    - `seconds`: time spent, by part of the work (`forward`, `backward`, `update`, `border`, `aux_forward`, ...).
    - `micros`, `batches`: handled in that time.
    - `records`: measurements at the border below, oldest first.
    - `cosines`: update, cosine with the gradient of backpropagation, ratio of the norms, where that was probed.
    - `capacity`: of the AuxNet.

    >>> LocalStatistics(1, records=[BorderRecord(0, 0.5, 1.0, 0.0, 0.1)]).mean("violation")
    0.5
    """

    stage: int
    seconds: dict[str, float] = field(default_factory=dict)
    micros: int = 0
    batches: int = 0
    records: Sequence[BorderRecord] = ()
    cosines: Sequence[tuple[int, float, float]] = ()
    capacity: Capacity | None = None

    def mean(self, what: str, last: int | None = None) -> float:
        """The mean of a measurement at the border, over the `last` records."""
        values = [float(getattr(record, what)) for record in self.records[-last if last else None :]]
        return sum(values) / len(values) if values else float("nan")

    def cosine_thirds(self) -> list[float]:
        """The mean cosine in the first, second and third part of the run."""
        count = len(self.cosines)
        bounds = [count * i // 3 for i in range(4)]
        parts = [[c for _, c, _ in self.cosines[a:b]] for a, b in pairwise(bounds)]
        return [sum(part) / len(part) for part in parts if part]

    def metrics(self) -> dict[str, float]:
        """The newest measurements under names for `unlatch.io.metrics`."""
        found = self.records[-1].metrics(self.stage) if self.records else {}
        return found | ({f"stage{self.stage}/cosine": self.cosines[-1][1]} if self.cosines else {})
