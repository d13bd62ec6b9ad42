"""Does this machine have what runs need: torch, processes that can talk to each other, threads, memory."""

from __future__ import annotations

import os
import time

import psutil
import torch
import torch.distributed as dist

from ...transport.launch import Ranks
from .finding import Finding

__all__ = ["loopback", "machine"]

_WORDS = 1 << 18
_SCARCE = 1 << 30


def machine() -> Finding | str:
    """Versions, cores, threads and memory."""
    free = psutil.virtual_memory().available
    text = (
        f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} intra-op thread(s) in this "
        f"process, {free / 1e9:.1f} GB of memory free"
    )
    if free < _SCARCE:
        return Finding("machine", "differs", f"{text}: less than 1 GB is little even for small models")
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding(
            "machine", "differs", f"{text}; but this torch has no gloo, so several processes cannot work together"
        )
    return text


def exchange() -> float:
    """Send a megabyte there and back between two ranks, and check it. **Returns:** the seconds it took."""
    mine, other = dist.get_rank(), 1 - dist.get_rank()
    sent, got = torch.arange(_WORDS, dtype=torch.float32), torch.empty(_WORDS)
    start = time.perf_counter()
    if mine == 0:
        dist.send(sent, other)
        dist.recv(got, other)
    else:
        dist.recv(got, other)
        dist.send(got, other)
    if not torch.equal(sent, got):
        raise RuntimeError("what came back is not what was sent")
    return time.perf_counter() - start


def loopback(ranks: Ranks) -> str:
    """Two local processes exchange a message over gloo."""
    seconds = ranks.run(exchange, timeout=300.0)[0]
    return f"two processes found each other and exchanged 1 MB both ways over gloo in {1e3 * seconds:.1f} ms"
