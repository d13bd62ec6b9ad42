"""What messages and actions cost on this machine, measured on two of its ranks, with the library's own transport."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from ..methods import BASELINE
from ..schedule.channel import Channel
from ..train import parallelize
from ..transport.launch import Ranks
from ..transport.link import Carrier, Link
from ..transport.local_link import LocalLink, Neighbours, call_on_neighbours
from ..transport.mail import BACKWARD, Mail, Message
from ..transport.world import current_world

__all__ = ["Courier", "MachineCosts", "action_seconds", "channel", "machine_costs"]

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


def action_seconds(count: int = 32) -> float:
    """CPU seconds of an action where there is nothing to compute, with its messages of a few bytes.

    To be called on both ranks at the same time.
    """
    one = torch.ones(1, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    run = parallelize(
        model,
        BASELINE,
        stages=2,
        split=["1"],
        loss_fn=mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    )
    with run:
        for _ in range(4):
            run.step(one, one)
        dist.barrier()
        start = time.process_time()
        for _ in range(count):
            run.step(one, one)
        busy = time.process_time() - start
    # Forward, backward, update.
    return busy / count / 3


@dataclass(frozen=True)
class MachineCosts:
    """Seconds of an action beside its work, and the link between two ranks."""

    action: float
    channel: Channel


def machine_costs() -> MachineCosts:
    """Start two ranks on this machine and measure."""
    with Ranks(2) as ranks:
        found = ranks.run(_observe)
    action, latency, bandwidth = (statistics.fmean(values) for values in zip(*found, strict=True))
    # With as many ranks as cores, what copies a message takes its time from the ranks.
    return MachineCosts(action, Channel(bandwidth, latency, overlapped=len(os.sched_getaffinity(0)) > 2))


def _observe() -> tuple[float, float, float]:
    """Seconds of an action, seconds that a small message is under way beside its CPU time, bytes per second."""
    courier = Courier()
    small, large = 64, 1 << 22
    busy, under_way = courier.cost(small)
    more, _ = courier.cost(large)
    action = action_seconds()
    return action, max(0.0, under_way - busy), (large - small) / max(more - busy, 1e-9)
