"""How much memory a process held, how its lack is told from other errors, and what takes less."""

from __future__ import annotations

import resource

import torch

__all__ = ["TAKES_LESS", "is_out_of_memory", "most_held"]

TAKES_LESS = (
    "fewer samples in a batch, more micro-batches, more stages, or a method that recomputes activations take less"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that there was no memory.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the CPU has no error of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def most_held(children: bool = False) -> int:
    """Bytes that this process held at most so far, or the largest of those it started that have ended.

    >>> most_held() > 10**6
    True
    """
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_maxrss * 1024
