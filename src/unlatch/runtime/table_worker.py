"""One stage of a method with stored auxiliary variables: as with networks, but new samples are introduced first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..nn.randomness import replayable
from .border_worker import BorderWorker
from .jobs import Job
from .mail import FORWARD
from .precision import autocast
from .table_source import Roster, TableSource, sample_keys

__all__ = ["TableWorker"]


class TableWorker(BorderWorker):
    """Sends samples that have not been met through the network once, to begin with true inputs.

    **Arguments:** `roster`: the samples met so far, the same on every stage; that of the source where there is one.
    """

    roster: Roster

    def acquaint(self) -> None:
        if self.now is None:
            return
        job = self.now.job
        keys = sample_keys(job.x)
        if not self.roster.unknown(keys):
            return
        inputs = job.x if self.stage.first else self.take(FORWARD, job).payload
        if isinstance(self.source, TableSource):
            self.source.store(job, inputs, only_new=True)
        else:
            self.roster.enter(keys, self.index)
        if not self.stage.last:
            self.send(FORWARD, 1, job, self._pass(job, inputs))

    def stored(self) -> dict[str, Tensor]:
        return {**self.roster.tensors(), **(self.source.tensors() if self.source is not None else {})}

    def load_stored(self, found: dict[str, Tensor]) -> None:
        self.roster.load_tensors(found)
        if self.source is not None:
            self.source.load_tensors(found)

    @torch.no_grad()
    def _pass(self, job: Job, inputs: Any) -> Any:
        options = self.stage.options
        random = replayable(options.seed, self.index, job.micro.id)
        with self._statistics, random, autocast(options.precision):
            return self.stage.module(inputs)
