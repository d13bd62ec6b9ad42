"""What a message costs the two ranks of a machine, measured on the library's own transport."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from unlatch.errors import PeerLost
from unlatch.schedule.channel import Channel
from unlatch.transport.link import Link
from unlatch.transport.mail import BACKWARD, Mail, Message

_COUNT = 8


class _Peer:
    """Says why the other rank is gone, without asking anybody."""

    def loss(self, peer: int, error: Exception | None = None) -> PeerLost:
        return PeerLost(f"the connection to rank {peer} broke: {error}")

    def departure(self, peer: int) -> PeerLost:
        return PeerLost(f"rank {peer} has left")


class Courier:
    """A connection between two ranks for nothing but measuring; to be made on both at the same time."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._mail = Mail(range(self._rank, self._rank + 1))
        self._link = Link(1 - self._rank, dist.new_group(backend="gloo"), self._mail, _Peer())

    def cost(self, size: int) -> tuple[float, float]:
        """Send messages of `size` bytes to and fro.

        **Returns:** CPU seconds that a message takes from this rank, as the mean of sending and receiving it, and
        seconds from sending to arrival.
        """
        payload = torch.zeros(size, dtype=torch.uint8)
        self._to_and_fro(payload)
        dist.barrier()
        busy, start = time.process_time(), time.perf_counter()
        for _ in range(_COUNT):
            self._to_and_fro(payload)
        seconds = time.perf_counter() - start
        return (time.process_time() - busy) / (2 * _COUNT), seconds / (2 * _COUNT)

    def _to_and_fro(self, payload: torch.Tensor) -> None:
        if self._rank == 1:
            self._mail.take(BACKWARD, 1)
        self._link.send(Message(BACKWARD, 1 - self._rank, payload=payload))
        if self._rank == 0:
            self._mail.take(BACKWARD, 0)


def channel(size: int, busy: float, seconds: float, ranks: int = 2) -> Channel:
    """A link for messages of `size` bytes that cost each end `busy` CPU seconds and are there after `seconds`.

    Messages travel beside the computation only if there are cores for that. With as many ranks as cores, what copies
    them takes its time from the ranks, so that is what they are charged, and the rest of the way is latency.
    """
    if len(os.sched_getaffinity(0)) > ranks:
        return Channel(size / seconds)
    return Channel(size / busy, latency=max(0.0, seconds - busy), overlapped=False)
