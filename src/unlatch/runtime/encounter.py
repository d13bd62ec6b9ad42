"""What a worker learns about a micro-batch in the course of a tick."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .jobs import Job

__all__ = ["Encounter"]


class Encounter:
    """A worker and one micro-batch: what is known about it so far.

    **Arguments:** `job`: the micro-batch.
    """

    __slots__ = ("inputs", "job", "kappa", "kappa_above", "lam", "lam_above", "out", "p", "x")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.inputs: Any = None
        self.out: Any = None
        #: At the border below: predicted input, arriving state, gradient on the input, multiplier.
        self.lam: Tensor | None = None
        self.x: Tensor | None = None
        self.p: Tensor | None = None
        self.kappa: Tensor | None = None
        #: At the border above: what the next stage started from, and its multiplier.
        self.lam_above: Tensor | None = None
        self.kappa_above: Tensor | None = None
