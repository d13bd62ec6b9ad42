"""What a run measured about itself up to the end of a pass, for logs and summaries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..runtime.events import Event, bubble
from .run import Run
from .statistics import StageStatistics, local_statistics

__all__ = ["Measured", "measure", "recently"]

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
        return [_plain(stage) | {"bubble": self.bubbles[stage.rank]} for stage in self.stages]

    def numbers(self) -> dict[str, float]:
        """All of them by the names that logs use."""
        staged = {
            f"{_label(row)}/{name}": row[name] for row in self.rows() for name in _LOGGED if row[name] is not None
        }
        return staged | {name: value for part in self.special for name, value in part.metrics().items()}


def _plain(stage: StageStatistics) -> dict[str, Any]:
    return {name: value for name, value in vars(stage).items() if isinstance(value, int | float | None)}


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


def recently(run: Run, most: int) -> tuple[list[Event], list[dict[str, Any]]]:
    """What the stages of this rank did last, and the plain numbers of each; bubble and delay are of these actions.

    Asked in the midst of training: it waits for no other rank and no device, and costs as much as `most` actions.
    """
    recorder = run._engine.recorded
    events = list(islice(reversed(recorder.events), most))[::-1]
    stages = local_statistics(run._engine, run.method, run._world, run._links, recorder, events)
    return events, [_plain(stage) for stage in stages]
