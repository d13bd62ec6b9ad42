"""One stage of a method with local losses: what all such workers share.

A tick is one micro-batch. All workers of a process go through one phase before the next one begins, upwards or
downwards, such that every message is sent at an earlier place of that order than it is taken. What a worker computes
depends on its own state and on messages only, hence inline and distributed runs agree bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from ..nn.auxiliary import Capacity
from ..nn.tree import map_tensors
from .border_records import BorderRecord
from .clock import Clock
from .jobs import Job
from .mail import BACKWARD, FORWARD, Mail, Message
from .stage import Stage
from .trained import Trained
from .wire import dense

__all__ = ["DOWN", "UP", "SerialPart", "Worker"]

UP, DOWN = False, True


class Worker(ABC):
    """Drives one stage through the phases of a tick.

    **Arguments:** `losses`: where losses of micro-batches are noted by id, shared by the workers of a process.
    """

    #: The phases of a tick, and whether they go through the stages downwards.
    phases: ClassVar[tuple[tuple[str, bool], ...]] = ()

    def __init__(self, stage: Stage, mail: Mail, clock: Clock, losses: dict[int, float]) -> None:
        self.stage, self.index = stage, stage.index
        self.mail, self.clock, self.losses = mail, clock, losses
        #: Measurements at the border below, and the size of the network that predicts the stage's input.
        self.records: list[BorderRecord] = []
        self.capacity: Capacity | None = None

    @abstractmethod
    def open(self, job: Job | None) -> None:
        """Begin a tick with a new micro-batch, or with none while the last ones are finished."""

    def finish(self) -> None:
        """Apply the gradients of an incomplete accumulation."""
        if self.stage.unapplied:
            self.stage.update()

    def route(self, path: str | None) -> Any:
        """What evaluation along `path` uses of this stage: something with `evaluate`, or `None` for no such path."""
        return self.stage if path in (None, "serial") else None

    def trained(self) -> dict[str, Trained]:
        """What is trained here beside the stage, by name."""
        return {}

    def stored(self) -> dict[str, Tensor]:
        """What is stored here and belongs into a checkpoint."""
        return {}

    def load_stored(self, found: dict[str, Tensor]) -> None:  # noqa: B027 - most have nothing to do here
        """Take over what `stored` returned."""

    def take(self, kind: str, job: Job) -> Message:
        """The next message of this kind, which must be about this job."""
        return self.mail.take(kind, self.index, job.micro)

    def send(
        self, kind: str, step: int, job: Job, payload: Any = None, scalars: dict[str, float] | None = None
    ) -> None:
        """Tell the stage above (`step` 1) or below (-1), if there is one."""
        to = self.index + step
        if to >= 0:
            payload = map_tensors(dense, payload)
            self.mail.send(Message(kind, to, job.micro, payload, self.stage.version, scalars))


class SerialPart:
    """Plain backpropagation of single batches, for methods that use it now and then."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._inputs: Any = None

    def forward(self, job: Job) -> None:
        """Take the batch up to the next stage, or to the loss."""
        worker, stage = self._worker, self._worker.stage
        self._inputs = job.x if stage.first else worker.take(FORWARD, job).payload
        target = job.y if stage.last else None
        out = worker.clock("forward", job.micro, stage.forward, job.micro, self._inputs, target)
        if not stage.last:
            worker.send(FORWARD, 1, job, out)
            return
        assert stage.loss is not None
        worker.losses[job.micro.id] = stage.loss

    def backward(self, job: Job) -> Any:
        """Take the gradient down and update. **Returns:** the stage's input."""
        worker, stage = self._worker, self._worker.stage
        cotangent = None
        if not stage.last:
            message = worker.take(BACKWARD, job)
            assert message.scalars is not None
            worker.losses[job.micro.id] = message.scalars["loss"]
            cotangent = [message.payload]
        found = worker.clock("backward", job.micro, stage.backward, job.micro, cotangent).gradients
        if not stage.first:
            worker.send(BACKWARD, -1, job, found[0], {"loss": worker.losses[job.micro.id]})
        if job.micro.ends:
            worker.clock("update", job.micro, stage.update)
        return self._inputs
