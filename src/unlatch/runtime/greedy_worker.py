"""One stage of a method whose backward starts from a local guess: a head of its own (DGL) or a synthesiser (DNI).

Stages form a pipeline in which only outputs go up. The loss comes down by itself, one stage per tick, and what it takes
to train synthesisers follows two ticks after the forward.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ..nn.randomness import replayable
from .clock import Clock
from .jobs import ADJOINT, LOSS, Job
from .mail import FORWARD, Mail
from .stage import Stage
from .synthesis import Synthesis
from .trained import Trained
from .worker import DOWN, UP, Worker

__all__ = ["GreedyWorker", "HeadWorker", "SynthesisWorker"]

_FEEDBACK = 2
_STREAM = 1 << 32


class GreedyWorker(Worker):
    """Forward, local seed, backward, update, all at once; the loss passes by later.

    **Arguments:** `stages`: how many there are.
    """

    phases = (("feedback", UP), ("run", UP), ("loss", DOWN))

    def __init__(self, stage: Stage, stages: int, mail: Mail, clock: Clock, losses: dict[int, float]) -> None:
        super().__init__(stage, mail, clock, losses)
        self.now: Job | None = None
        self._delay = stages - 1 - stage.index
        self._line: deque[Job | None] = deque()

    def open(self, job: Job | None) -> None:
        self.now = job

    def feedback(self) -> None:
        """Learn from what came back about an earlier batch."""

    @abstractmethod
    def seed(self, job: Job, out: Tensor) -> Tensor:
        """What the backward starts from."""

    def run(self) -> None:
        """Handle one micro-batch from input to update."""
        if self.now is None:
            return
        job, stage = self.now, self.stage
        if not stage.first:
            inputs, target = self.take(FORWARD, job).payload
            job = self.now = Job(job.micro, inputs, target)
        out = self.clock("forward", job.micro, stage.forward, job.micro, job.x, job.y if stage.last else None)
        seeds = None
        if not stage.last:
            self.send(FORWARD, 1, job, (out, job.y))
            seeds = [self.clock("border", job.micro, self.seed, job, out)]
        found = self.clock("backward", job.micro, stage.backward, job.micro, seeds).gradients
        self.returned(job, found[0] if found else None)
        if job.micro.ends:
            self.clock("update", job.micro, stage.update)

    def returned(self, job: Job, gradient: Tensor | None) -> None:
        """Told the gradient found at the stage's input."""

    def loss(self) -> None:
        """Pass on the loss of the micro-batch that left the last stage a tick ago per stage between."""
        stage = self.stage
        self._line.append(self.now)
        job = self._line.popleft() if len(self._line) > self._delay else None
        if job is None:
            return
        if stage.last:
            assert stage.loss is not None
            scalars = {"loss": stage.loss}
        else:
            message = self.take(LOSS, job)
            assert message.scalars is not None
            scalars = message.scalars
        self.losses[job.micro.id] = scalars["loss"]
        self.send(LOSS, -1, job, None, scalars)


class HeadWorker(GreedyWorker):
    """A stage with a head of its own.

    **Arguments:** `head`: turns the stage's output into outputs of the network; the last stage has none.
    """

    head: Trained | None = None
    _batches = 0

    def seed(self, job: Job, out: Tensor) -> Tensor:
        assert self.head is not None
        options, leaf = self.stage.options, out.detach().requires_grad_()
        with replayable(options.seed, self.index + _STREAM, job.micro.id):
            loss = options.loss_fn(self.head.module(leaf), job.y)
        torch.autograd.backward(loss * job.micro.scale)
        self._batches += job.micro.index == job.micro.count - 1
        if job.micro.ends:
            self.finish_head()
        assert leaf.grad is not None
        return leaf.grad

    def finish_head(self) -> None:
        """Apply the gradients of the head."""
        if self.head is not None and self._batches:
            self.head.update(self._batches)
            self._batches = 0

    def finish(self) -> None:
        super().finish()
        self.finish_head()

    def trained(self) -> dict[str, Trained]:
        return {"head": self.head} if self.head is not None else {}


class SynthesisWorker(GreedyWorker):
    """A stage that guesses the gradient from above and learns from the one that the next stage finds.

    **Arguments:** `synthesis`: guesses; the last stage has none.
    """

    synthesis: Synthesis | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._waiting: deque[tuple[Job, Tensor] | None] = deque([None] * _FEEDBACK)

    def feedback(self) -> None:
        if self.synthesis is None:
            return
        kept = self._waiting.popleft()
        if kept is not None:
            job, out = kept
            gradient = self.take(ADJOINT, job).payload
            self.clock("border", job.micro, self.synthesis.learn, out, job.y, gradient)
        if self.now is None:
            self._waiting.append(None)

    def seed(self, job: Job, out: Tensor) -> Tensor:
        assert self.synthesis is not None
        self._waiting.append((job, out))
        with torch.no_grad():
            return self.synthesis.guess(out, job.y)

    def returned(self, job: Job, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.send(ADJOINT, -1, job, gradient)

    def trained(self) -> dict[str, Trained]:
        return {"synthesiser": self.synthesis.net} if self.synthesis is not None else {}
