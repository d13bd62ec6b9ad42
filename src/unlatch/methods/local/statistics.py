"""What a method with local losses measured about itself, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from ...nn.auxiliary import Capacity
from .speedup import LayerParallelTimes

__all__ = ["MOST_RECORDS", "BorderRecord", "LocalStatistics", "layer_parallel_times", "time_by_part"]

#: Measurements of one kind that a stage keeps, the newest ones, so that a long run stays bounded.
MOST_RECORDS = 10_000
_SERIAL = ("forward", "backward", "update")
#: What entries are called in the speed-up formula; whatever else there is belongs to borders.
_PARTS = {
    **dict.fromkeys(("F", "Fs"), "forward"),
    **dict.fromkeys(("B", "Bs"), "backward"),
    **dict.fromkeys(("U", "Us"), "update"),
    "P": "aux_forward",
    **dict.fromkeys(("C", "X", "V", "R+", "T+"), "aux_backward"),
    "Y": "trial",
    "E+": "echo",
}


def time_by_part(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by kind of entry, added up by part of the work.

    >>> time_by_part({"F": 1.0, "C": 2.0, "V": 0.5, "S": 0.25})
    {'forward': 1.0, 'aux_backward': 2.5, 'border': 0.25}
    """
    found: dict[str, float] = {}
    for kind, spent in seconds.items():
        part = _PARTS.get(kind, "border")
        found[part] = found.get(part, 0.0) + spent
    return found


@dataclass(frozen=True)
class BorderRecord:
    """One measurement.

    **Arguments:**

    - `update`: when.
    - `violation`: distance between predicted input and arriving state, relative to the state.
    - `jump`: distance between the gradient on the input and the seed given to the stage below, relative to the former.
    - `multiplier`: norm of the multiplier, 0 without one (and where it is only guessed on the other side).
    - `loss`: psi, what the prediction is asked to lower.
    """

    update: int
    violation: float
    jump: float
    multiplier: float
    loss: float

    def metrics(self, border: int) -> dict[str, float]:
        """The numbers under names for `unlatch.io.metrics`."""
        numbers = {k: v for k, v in asdict(self).items() if k != "update"}
        return {f"border{border}/{name}": value for name, value in numbers.items()}


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


def layer_parallel_times(measured: Sequence[LocalStatistics], data: float = 0.0) -> LayerParallelTimes:
    """The terms of the speed-up formula, per batch, from what every stage measured.

    **Arguments:** `data`: seconds per batch to load and send it.

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
