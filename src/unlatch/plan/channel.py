"""What a message costs between two neighbouring processors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import PlanError
from ..schedule import Link

__all__ = ["FREE", "Channel"]


@dataclass(frozen=True)
class Channel:
    """A link between neighbours.

    **Arguments:**

    - `bandwidth`: bytes per unit of time, in each direction.
    - `latency`: time from the end of the transmission to the arrival.
    - `overlapped`: whether messages travel while both processors compute; otherwise both are held up by every message.

    >>> Channel(bandwidth=100, latency=1).time(50)
    1.5
    """

    bandwidth: float = math.inf
    latency: float = 0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf):
            raise PlanError(
                f"a link needs a bandwidth above 0 and a latency of at least 0, got {self.bandwidth} and {self.latency}"
            )

    def time(self, size: float, messages: int = 1) -> float:
        """Time that `messages` messages of together `size` bytes take, one after the other."""
        return size / self.bandwidth + messages * self.latency

    def link(self, forward: float, backward: float) -> Link:
        """The border of a simulation over which messages of these sizes go up and down."""
        return Link(self.latency, forward / self.bandwidth, backward / self.bandwidth)


#: Messages take no time.
FREE = Channel()
