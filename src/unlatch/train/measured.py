"""What a run measured about itself up to the end of a pass, for logs and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..runtime.events import bubble
from .run import Run
from .statistics import StageStatistics

__all__ = ["Measured", "measure"]

_LOGGED = (
    "staleness",
    "predicted_staleness",
    "delay",
    "bubble",
    "in_flight",
    "peak_bytes",
    "stored_bytes",
    "message_bytes",
    "weight_copies",
    "updates",
    "bytes_sent",
    "reconstruction_error",
)


@dataclass(frozen=True)
class Measured:
    """The same on every rank.

    **Arguments:**

    - `stages`: staleness and memory of every stage so far.
    - `bubbles`: of every rank, of the last pass alone, since evaluation is not idleness.
    - `special`: what the method measured about itself.
    """

    stages: tuple[StageStatistics, ...]
    bubbles: tuple[float, ...]
    special: tuple[Any, ...]

    def rows(self) -> list[dict[str, Any]]:
        """The plain numbers of each stage by name."""
        return [
            {k: v for k, v in asdict(stage).items() if isinstance(v, int | float | None)}
            | {"bubble": self.bubbles[stage.rank]}
            for stage in self.stages
        ]

    def numbers(self) -> dict[str, float]:
        """All of them by the names that logs use."""
        staged = {
            f"{_label(row)}/{name}": row[name] for row in self.rows() for name in _LOGGED if row[name] is not None
        }
        return staged | {name: value for part in self.special for name, value in part.metrics().items()}


def _label(row: Mapping[str, Any]) -> str:
    """What logs call a stage; those of further replicas have names of their own."""
    return f"stage{row['stage']}" + (f"_replica{row['replica']}" if row["replica"] else "")


def measure(run: Run, since: float) -> Measured:
    """Called on all ranks. **Arguments:** `since`: when the pass began."""
    stages = tuple(run.statistics())
    mine = [e for e in run.events if e.start >= since]
    with run._reporting("statistics"):
        idle = tuple(run._world.gather(bubble(mine, {e.stage for e in mine})))
    return Measured(stages, idle, tuple(run.method_statistics()))
