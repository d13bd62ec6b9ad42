"""What a message costs between two devices."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ScheduleError

__all__ = ["FREE", "Channel"]


@dataclass(frozen=True)
class Channel:
    """A link.

    **Arguments:**

    - `bandwidth`: bytes per unit of time.
    - `latency`: time from the end of the transmission to the arrival.
    - `overlapped`: whether messages travel while both devices compute; otherwise each message holds up both.

    >>> Channel(bandwidth=100, latency=1).time(50)
    1.5
    """

    bandwidth: float = math.inf
    latency: float = 0
    overlapped: bool = True

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and 0 <= self.latency < math.inf):
            raise ScheduleError(
                f"a link needs a bandwidth above 0 and a latency of at least 0, got {self.bandwidth} and {self.latency}"
            )

    def time(self, size: float) -> float:
        """Time from the start of sending `size` bytes to their arrival."""
        return self.sending(size) + self.latency

    def sending(self, size: float) -> float:
        """Time that `size` bytes occupy the link; an exact 0 where it is none, so that fractions stay fractions.

        >>> Channel(bandwidth=100).sending(50), Channel().sending(50)
        (0.5, 0)
        """
        return size / self.bandwidth if size and self.bandwidth < math.inf else 0


#: Messages take no time.
FREE = Channel()
