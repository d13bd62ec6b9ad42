"""Executes a LayerPipe plan slot by slot, self-timed: no barrier, only the messages that tasks wait for.

To a `Run` it looks like the engine that follows a schedule of stages. A stage here is a layer, or a run of layers, at
its home; a processor without a home has an empty one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..schedule import Action, Kind
from .engine import Engine, Finished, Part
from .events import Event, Recorder
from .mail import FORWARD, Message
from .micro import Micro
from .processor import Processor
from .stage import Stage

__all__ = ["TaskEngine", "TaskRecorder"]


class TaskRecorder(Recorder):
    """Events of tasks, which are not all done where a layer lives; staleness is told by its home."""

    def add(self, event: Event) -> None:
        self.events.append(event)

    def stale(self, stage: int, micro: Micro, behind: int) -> None:
        """Note how many updates lie between a forward and its gradient's arrival."""
        self._behind.setdefault(micro.id, {})[stage] = behind
        self._history.setdefault(stage, deque(maxlen=4096)).append(behind)


class TaskEngine(Engine):
    """Runs the processors of this process. Build it, then `attach` them.

    Every process learns of a micro-batch by a note that the leading one sends on; so each knows in which slot it is.
    """

    def attach(self, processors: Sequence[Processor], depth: int) -> None:
        """Take over the processors; `depth` is the number of slots until a micro-batch is through."""
        self.processors = list(processors)
        self.depth = depth
        # A process may run ahead of another until it needs something from it, at most a round trip.
        self.mail.capacity = max(self.mail.capacity, 2 * depth + self.microbatches + 4)

    @property
    def losses(self) -> dict[int, float]:
        """Of micro-batches under way."""
        return self._losses

    def timed(self, stage: Stage, kind: Kind, subject: Micro | int, work: Callable[..., Any], *args: Any) -> Any:
        """Do something, record it under the name of a stage, and say where it failed if it does."""
        return self._timed(stage, kind, subject, work, *args)

    def step(self, x: Any = None, y: Any = None) -> list[Finished] | None:
        if self.leads:
            parts = self._cut(x, y)
            count = len(parts)
        else:
            first = self.mail.peek(FORWARD, self.lowest)
            if first.micro is None:
                self.mail.take(FORWARD, self.lowest)
                self.announce_end()
                return None
            count = first.micro.count
        for index in range(count):
            if self.leads:
                micro, xi, yi = parts[index]
                self.processors[0].feed(micro, xi, yi)
            else:
                note = self.mail.take(FORWARD, self.lowest).micro
                assert note is not None
                micro = note
            self._tell(micro)
            self._micros[self._fed] = micro
            self._fed += 1
            self._slot(self._fed - 1)
        self.batches += 1
        return self._collect(self._fed - self.depth)

    def _run(self, actions: Iterable[Action], parts: Iterator[Part]) -> None:
        """Empty the pipeline, slot by slot; `step` does not come here."""
        for slot in range(self._fed, self._fed + self.depth):
            self._slot(slot)

    def _slot(self, slot: int) -> None:
        for processor in self.processors:
            processor.slot(slot, self._micros)

    def _tell(self, micro: Micro) -> None:
        above = max(self.stages) + 1
        if above < self.schedule.stages:
            self.mail.send(Message(FORWARD, above, micro))
