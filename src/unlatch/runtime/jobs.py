"""What the workers of local methods pass around: raw batches with a checksum, and the kinds of messages they send."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..nn.tree import flatten
from .micro import Micro

__all__ = [
    "ADJOINT",
    "BATCH",
    "INPUT",
    "LOSS",
    "MULTIPLIER",
    "PARTIAL",
    "SENT_DOWN",
    "SENT_UP",
    "STATE",
    "TOTAL",
    "Job",
    "check_same",
    "checksum",
]

#: Raw data, from rank to rank.
BATCH = "batch"
#: The predicted input of a stage, to the stage below.
INPUT = "input"
#: The output of a stage, to the stage above.
STATE = "state"
#: A multiplier made within the iteration, to the stage below.
MULTIPLIER = "multiplier"
#: The gradient found at a stage's input, to whoever learns to guess it below.
ADJOINT = "adjoint"
#: The loss, from the last stage down to the first.
LOSS = "loss"
#: Gradients of a shared AuxNet: sums on their way down, totals on their way up.
PARTIAL, TOTAL = "partial", "total"

#: What only the rank below or above sends, so that a wait for it is in vain once that rank has left.
SENT_UP, SENT_DOWN = (BATCH, STATE, TOTAL), (INPUT, MULTIPLIER, ADJOINT, LOSS, PARTIAL)


@dataclass(frozen=True, slots=True)
class Job:
    """A micro-batch with its raw data, where these are known."""

    micro: Micro
    x: Any = None
    y: Any = None


def checksum(tree: Any) -> float:
    """A CRC-32 of all bytes, as a number that JSON carries exactly.

    >>> import torch
    >>> checksum(torch.zeros(3)) == checksum(torch.zeros(3)), checksum(torch.zeros(3)) == checksum(torch.ones(3))
    (True, False)
    """
    value = 0
    for t in flatten(tree)[0]:
        value = zlib.crc32(_bytes(t), value)
    return float(value)


def _bytes(t: Tensor) -> Any:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def check_same(job: Job, expected: float, stage: int) -> None:
    """Raise `DataError` unless the raw data of a job has the checksum that the first rank found."""
    got = checksum((job.x, job.y))
    if got != expected:
        raise DataError(
            f"stage {stage} has other data for {job.micro} than stage 0 (checksums {got:.0f} and {expected:.0f}): with "
            'data="build" every rank must use the same sampler seed and the same augmentation stream'
        )
