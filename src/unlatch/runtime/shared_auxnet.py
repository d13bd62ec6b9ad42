"""One coarse network that all stages tap: every rank trains a copy of the part it needs, all copies in step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .jobs import PARTIAL, TOTAL
from .mail import Message
from .sources import AuxNetSource
from .worker import Worker

__all__ = ["SharedAuxNetSource"]


class SharedAuxNetSource(AuxNetSource):
    """A copy of the first parts of the shared network, up to this stage's tap.

    The gradient of a part is the sum over all taps above it. Sums go down from the last stage, each adding its own, and
    the totals go up again, so that all copies take the same step.
    """

    shared = True

    def _gradients(self, parts: int) -> list[Tensor]:
        """Of the first `parts` parts, in a fixed order; zeros where nothing was found."""
        return [
            p.grad if p.grad is not None else torch.zeros_like(p)
            for part in list(self.module.parts)[:parts]
            for p in part.parameters()
        ]

    def _set(self, gradients: list[Tensor]) -> None:
        owners = [p for part in self.module.parts for p in part.parameters()]
        for p, gradient in zip(owners, gradients, strict=False):
            p.grad = gradient.clone()

    def reduce(self, worker: Worker) -> None:
        stage = worker.stage
        if not stage.last:
            above = worker.mail.take(PARTIAL, stage.index).payload
            own = self._gradients(len(self.module.parts))
            self._set([a + b for a, b in zip(own, above, strict=True)])
        if stage.index > 1:
            worker.mail.send(Message(PARTIAL, stage.index - 1, payload=self._copies(stage.index - 1)))

    def spread(self, worker: Worker) -> None:
        stage = worker.stage
        if stage.index > 1:
            self._set(worker.mail.take(TOTAL, stage.index).payload)
        if not stage.last:
            worker.mail.send(Message(TOTAL, stage.index + 1, payload=self._copies(stage.index)))

    def update(self, batches: int) -> None:
        # Copies hold different numbers of parts, so the norm that is limited must be that of a part.
        if self._options.clip_grad_norm is not None:
            for part in self.module.parts:
                nn.utils.clip_grad_norm_(part.parameters(), self._options.clip_grad_norm)
        super().update(batches)

    def _copies(self, parts: int) -> list[Tensor]:
        return [gradient.clone() for gradient in self._gradients(parts)]
