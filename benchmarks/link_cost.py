"""What a message costs the two ranks of a machine, measured on the library's own transport."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from unlatch.schedule.channel import Channel
from unlatch.transport.link import Carrier, Link
from unlatch.transport.local_link import LocalLink, Neighbours, call_on_neighbours
from unlatch.transport.mail import BACKWARD, Mail, Message
from unlatch.transport.world import current_world

_COUNT = 8


class Courier:
    """A connection between two ranks for nothing but measuring; to be made on both at the same time.

    **Arguments:** `transport`: as for `unlatch.parallelize`.
    """

    def __init__(self, transport: str = "auto") -> None:
        world = current_world()
        assert world.health is not None
        assert world.group is not None
        self._rank, peer = world.rank, 1 - world.rank
        self._mail = Mail(range(self._rank, self._rank + 1))
        channels = call_on_neighbours(world, world.health, [peer], alone=transport == "gloo")
        self._link: Carrier
        if channels:
            self._link = LocalLink(peer, channels[peer], Neighbours(self._mail), self._mail, world.health)
        else:
            self._link = Link(peer, world.group, self._mail, world.health)

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
