"""What a run measured about itself, per stage, beside what theory gives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ..methods import Method
from ..runtime.engine import Engine
from ..runtime.events import Event, Recorder, bubble
from ..transport.link import Carrier
from ..transport.world import World

__all__ = ["StageStatistics", "gather_statistics", "local_statistics"]


@dataclass(frozen=True)
class StageStatistics:
    """One stage's part of a run.

    **Arguments:**

    - `staleness`, `predicted_staleness`: mean updates between forward and backward of a micro-batch.
    - `bubble`: share of its process's time, first action to last, without computation.
    - `peak_bytes`: most bytes kept for batches under way (and for the graph being differentiated).
    - `weight_copies`: most old weight versions alive at once.
    - `bytes_sent`: by its process, over all links.
    - `delay`: most micro-batches that began between forward and backward of one: the staleness in ticks.
    - `in_flight`: most micro-batches between their forward and the end of their backward, the one at work included.
    - `stored_bytes`: most bytes stored for these, as queues of inputs or as graphs; 0 where inputs are reconstructed.
    - `message_bytes`: most bytes of activations, targets and gradients that had come for it and were not taken up yet.
    - `reconstruction_error`: largest relative error of a reconstructed input; `None` where none is reconstructed.
    - `usual_reconstruction_error`: median of the later half of these measurements, when the pipeline is full.
    - `reconstruction`: all measurements (micro-batch, error), newest last.
    - `replica`: which one of the network it is a stage of.
    """

    stage: int
    rank: int
    updates: int
    staleness: float
    predicted_staleness: float
    bubble: float
    busy_seconds: float
    peak_bytes: int
    weight_copies: int
    bytes_sent: int
    delay: int = 0
    in_flight: int = 0
    stored_bytes: int = 0
    message_bytes: int = 0
    reconstruction_error: float | None = None
    usual_reconstruction_error: float | None = None
    reconstruction: tuple[tuple[int, float], ...] = ()
    replica: int = 0


def gather_statistics(engine: Engine, method: Method, world: World, links: Sequence[Carrier]) -> list[StageStatistics]:
    """Measure the local stages and exchange the results."""
    recorder = engine.recorder
    own = local_statistics(engine, method, world, links, recorder, recorder.events)
    return sorted((s for part in world.gather(own) for s in part), key=lambda s: (s.replica, s.stage))


def local_statistics(
    engine: Engine,
    method: Method,
    world: World,
    links: Sequence[Carrier],
    recorder: Recorder,
    events: Collection[Event],
) -> list[StageStatistics]:
    """Measure the local stages. **Arguments:** `events`: those that time is measured by, all or some."""
    idle = bubble(events, engine.stages, recorder.pauses)
    predicted = method.staleness(engine.schedule.stages)
    sent = sum(link.bytes_sent for link in links)
    return [
        StageStatistics(
            stage=stage.index,
            rank=world.rank,
            updates=stage.version,
            staleness=recorder.staleness(index),
            predicted_staleness=predicted[stage.index],
            bubble=idle,
            busy_seconds=sum(e.end - e.start for e in events if e.stage == index),
            peak_bytes=stage.peak_bytes,
            weight_copies=stage.peak_versions,
            bytes_sent=sent,
            delay=_delay(e for e in events if e.stage == index),
            in_flight=stage.most_in_flight,
            stored_bytes=stage.stored_bytes,
            message_bytes=engine.mail.waiting.most[index],
            reconstruction_error=stage.reconstruction.worst if stage.reverses else None,
            usual_reconstruction_error=stage.reconstruction.usual if stage.reverses else None,
            reconstruction=tuple(stage.reconstruction.history),
            replica=engine.stations[index].column,
        )
        for index, stage in engine.stages.items()
    ]


def _delay(events: Iterable[Event]) -> int:
    """The largest distance between the newest forward of a stage and the backward that follows it."""
    newest = most = 0
    for event in events:
        if event.kind == "F":
            newest = event.batch
        elif event.kind in ("B", "I"):
            most = max(most, newest - event.batch)
    return most
