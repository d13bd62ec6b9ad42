"""Memory of a process: how much it held, that a rank keeps what it frees, how a lack is told, what takes less."""

from __future__ import annotations

import ctypes
import os
import resource

import torch

__all__ = ["TAKES_LESS", "is_out_of_memory", "keep_freed_memory", "most_held"]

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


#: Of glibc's `mallopt`: how much may lie free before it goes back to the system, from which size on a block is a
#: mapping of its own and goes back at once (it takes no more than this), and how much is asked for at a time.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _TOP_PAD = (-1, 2**31 - 1), (-3, 32 * 2**20), (-2, 64 * 2**20)


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, in blocks below 32 MiB, for what it allocates next.

    A stage allocates for every batch what it has freed for the last one. By default glibc may return it to the system
    in between, and then every page of a few kilobytes is taken anew, cleared, by a fault of its own. That costs time
    in training (`benchmarks/freed_memory.py`), and more where blocks are measured before it, one after the other.

    **Returns:** whether it does so now: not where the user has set up the allocator by environment variables, nor where
    there is another one.

    >>> isinstance(keep_freed_memory(), bool)
    True
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        mallopt(*setting) == 1 for setting in (_TRIM_THRESHOLD, _MMAP_THRESHOLD, _TOP_PAD)
    )
