"""From the streams of a schedule to a graph of tasks: stages, borders, devices of different speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..errors import ScheduleError
from .channel import FREE, Channel
from .entries import Entry, Route
from .runs import Streams, station_devices
from .simulate import UNIT, Costs, time_of
from .simulator_engine import Graph, message_graph

__all__ = ["Machine", "StageWork", "jitter_factors", "message_bytes", "stage_graph"]


@dataclass(frozen=True)
class StageWork:
    """What one stage does with one micro-batch.

    **Arguments:**

    - `times`: of each kind of action.
    - `output_bytes`: sent up by every forward.
    - `returned_bytes`: sent back over the same border; as much as went up by default.
    - `kept_bytes`: kept from the forward to the end of the backward.
    """

    times: Costs = field(default_factory=lambda: UNIT)
    output_bytes: float = 0
    kept_bytes: float = 0
    returned_bytes: float | None = None

    @property
    def border_bytes(self) -> tuple[float, float]:
        """Up and down over the border above."""
        return self.output_bytes, self.output_bytes if self.returned_bytes is None else self.returned_bytes


@dataclass(frozen=True)
class Machine:
    """The devices and the links between them.

    **Arguments:**

    - `channel`: one for all links, or one for each border between stages.
    - `speeds`: how much faster than the given times each device is; by default all are as fast as given.
    - `jitter`: standard deviation of the time of each action, relative to its mean (log-normal).
    - `seed`: of the jitter.
    """

    channel: Channel | Sequence[Channel] = FREE
    speeds: Sequence[float] | None = None
    jitter: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.speeds is not None and not all(speed > 0 for speed in self.speeds):
            raise ScheduleError(f"speeds must be above 0, got {list(self.speeds)}")
        if not self.jitter >= 0:
            raise ScheduleError(f"jitter must be at least 0, got {self.jitter}")

    def channels(self, borders: int) -> list[Channel]:
        """The link of every border."""
        if isinstance(self.channel, Channel):
            return [self.channel] * borders
        if len(self.channel) != borders:
            raise ScheduleError(f"expected links for {borders} borders, got {len(self.channel)}")
        return list(self.channel)

    def time(self, time: float, device: int) -> float:
        """What `time` becomes on a device."""
        return time if self.speeds is None else time / self.speeds[device]


def stage_graph(streams: Streams, works: Sequence[StageWork], machine: Machine) -> tuple[Graph, list[list[int]]]:
    """Tasks and messages of these streams, with the times that they take on a machine."""
    home = station_devices(streams)
    if len(works) != len(home):
        raise ScheduleError(f"expected the work of {len(home)} stages, got {len(works)}")
    if machine.speeds is not None and len(machine.speeds) != len(streams):
        raise ScheduleError(f"expected the speeds of {len(streams)} devices, got {len(machine.speeds)}")
    channels = machine.channels(len(home) - 1)

    def carry(route: Route) -> tuple[float, float, bool]:
        channel = channels[min(route[1], route[2])]
        return channel.sending(message_bytes(route, works)), channel.latency, not channel.overlapped

    def time(entry: Entry) -> float:
        return machine.time(time_of(works[entry.station].times, entry.kind), home[entry.station])

    return message_graph(streams, time, carry)


def message_bytes(route: Route, works: Sequence[StageWork]) -> float:
    """Bytes of one message between neighbouring stages."""
    _, sender, receiver = route
    up, down = works[min(sender, receiver)].border_bytes
    return up if receiver > sender else down


def jitter_factors(machine: Machine, lengths: Sequence[int]) -> list[list[float]] | None:
    """Factors on the time of every action, mean 1; the same for the same seed and device."""
    if not machine.jitter:
        return None
    sigma = float(np.sqrt(np.log1p(machine.jitter**2)))
    return [
        np.random.default_rng([machine.seed, device]).lognormal(-(sigma**2) / 2, sigma, length).tolist()
        for device, length in enumerate(lengths)
    ]
