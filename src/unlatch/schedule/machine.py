"""The devices of a simulated run and the links between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ScheduleError
from .channel import FREE, Channel
from .entries import Cost, Route

__all__ = ["Machine"]


@dataclass(frozen=True)
class Machine:
    """How fast devices are, and what messages between them cost.

    Every device has a wire to every other one, for each direction; messages on one wire go one after the other.

    **Arguments:**

    - `channel`: one for all wires, or one for each border between neighbouring stages.
    - `speeds`: how much faster than the given times each device is; by default all are as fast as given.
    - `jitter`: standard deviation of the time of each action, relative to its mean (log-normal).
    - `seed`: of the jitter.
    - `action`: what every action costs a device beside its work: finding, checking and recording it.
    - `update`: what an update costs, one time for all devices or one for each.
    """

    channel: Channel | Sequence[Channel] = FREE
    speeds: Sequence[float] | None = None
    jitter: float = 0
    seed: int = 0
    action: float = 0
    update: float | Sequence[float] = 0

    def __post_init__(self) -> None:
        if self.speeds is not None and not all(speed > 0 for speed in self.speeds):
            raise ScheduleError(f"speeds must be above 0, got {list(self.speeds)}")
        if not self.jitter >= 0:
            raise ScheduleError(f"jitter must be at least 0, got {self.jitter}")
        if not (self.action >= 0 and all(time >= 0 for time in self._updates)):
            raise ScheduleError(f"costs must be at least 0, got {self.action} per action, {self.update} per update")

    @property
    def _updates(self) -> Sequence[float]:
        return (self.update,) if isinstance(self.update, int | float) else self.update

    def check(self, stations: int, devices: int) -> None:
        """Raise `ScheduleError` unless it has what so many stations on so many devices need."""
        if self.speeds is not None and len(self.speeds) != devices:
            raise ScheduleError(f"expected the speeds of {devices} devices, got {len(self.speeds)}")
        if not isinstance(self.update, int | float) and len(self.update) != devices:
            raise ScheduleError(f"expected the cost of an update on {devices} devices, got {len(self.update)}")
        if not isinstance(self.channel, Channel) and len(self.channel) != stations - 1:
            raise ScheduleError(f"expected links for {stations - 1} borders, got {len(self.channel)}")

    def link(self, route: Route) -> Channel:
        """What a message travels on."""
        if isinstance(self.channel, Channel):
            return self.channel
        _, sender, receiver = route
        if abs(sender - receiver) != 1:
            raise ScheduleError(
                f"messages {route[0]} go from station {sender} to {receiver}, which share no border: give one channel "
                "for all links"
            )
        return self.channel[min(sender, receiver)]

    def time(self, time: float, device: int, cost: Cost = "none") -> float:
        """What the `time` of an action becomes on a device. **Arguments:** `cost`: what it costs as.

        >>> Machine(speeds=(1, 2), action=1, update=5).time(8, 1, "update")
        10.0
        """
        scaled = time if self.speeds is None else time / self.speeds[device]
        if cost == "update":
            scaled += self.update if isinstance(self.update, int | float) else self.update[device]
        return scaled + self.action

    def jitter_factors(self, lengths: Sequence[int]) -> list[list[float]] | None:
        """Factors on the time of every action, mean 1; the same for the same seed and device."""
        if not self.jitter:
            return None
        sigma = float(np.sqrt(np.log1p(self.jitter**2)))
        return [
            np.random.default_rng([self.seed, device]).lognormal(-(sigma**2) / 2, sigma, length).tolist()
            for device, length in enumerate(lengths)
        ]
