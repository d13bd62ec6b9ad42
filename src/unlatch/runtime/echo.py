"""The last stage hears true states as well, one batch late, so that it learns the network it will be used in.

What arrives at the border is there anyway, to correct the predicted inputs. Used once more in the next iteration, as an
input with its own labels, it costs a pass of the last stage, but no message and no waiting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..nn.randomness import replayable
from .jobs import Job
from .precision import autocast
from .stage import Stage

__all__ = ["Echo"]

_STREAM = 1 << 34


class Echo:
    """Remembers the newest true state and mixes its gradient into that of the predicted input."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._heard: tuple[Job, Tensor] | None = None

    def hear(self, job: Job, x: Tensor) -> None:
        """Keep a true state for the next update."""
        self._heard = job, x

    def mix(self, share: float) -> None:
        """Turn the stage's gradients into `1 - share` of themselves plus `share` of those at the true state."""
        if self._heard is None or share == 0.0:
            return
        (job, x), self._heard = self._heard, None
        stage = self._stage
        grads = [p.grad for p in stage.params if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, 1.0 - share)
        with replayable(stage.options.seed, stage.index + _STREAM, job.micro.id), autocast(stage.options.precision):
            loss = stage.options.loss_fn(stage.module(x), job.y)
        torch.autograd.backward(share * loss)
