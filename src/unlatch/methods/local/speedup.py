"""What layer-parallel training with auxiliary networks gains: a formula, and the number of stages at which it pays."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

__all__ = ["LayerParallelTimes"]


@dataclass(frozen=True)
class LayerParallelTimes:
    """Seconds per batch of everything that takes time.

    rho(K) = (T_d + T_f + T_b) / (T_d + t_psi + t_f + t_b + (T_f + T_b) / K), with the terms of the serial run above
    and, below, what every rank does besides its share of the network.

    **Arguments:**

    - `data`, `forward`, `backward`: of serial backpropagation (T_d, T_f, T_b).
    - `border`: losses and messages at borders (t_psi).
    - `aux_forward`, `aux_backward`: of the largest auxiliary network (t_f, t_b).

    >>> times = LayerParallelTimes(0.0, 1.0, 2.0, 0.0, 0.1, 0.2)
    >>> round(times.speed_up(2), 3), round(times.break_even, 3), round(times.limit, 3)
    (1.667, 1.111, 10.0)
    >>> print(times.text(2))
    1.67 times as fast as bp at 2 stages (1800.0 ms a step), pays from 1.11 stages on, at most 10.0 times as fast
    """

    data: float
    forward: float
    backward: float
    border: float
    aux_forward: float
    aux_backward: float

    @property
    def serial(self) -> float:
        """Seconds of backpropagation in one process."""
        return self.data + self.forward + self.backward

    @property
    def overhead(self) -> float:
        """Seconds that the method adds on every rank, whatever the number of stages."""
        return self.border + self.aux_forward + self.aux_backward

    def summary(self, stages: int) -> dict[str, float | None]:
        """Terms and predictions by name; `None` for what is infinite."""
        predicted = {"break_even_stages": self.break_even, "limit": self.limit}
        return {
            **{f"{name}_seconds": value for name, value in asdict(self).items()},
            "stages": stages,
            "step_seconds": self.step(stages),
            "speed_up": self.speed_up(stages),
            **{name: value if math.isfinite(value) else None for name, value in predicted.items()},
        }

    def text(self, stages: int) -> str:
        """The prediction in words."""
        gain = f"{self.speed_up(stages):.2f} times as fast as bp at {stages} stages"
        step = f"({1e3 * self.step(stages):.1f} ms a step)"
        if math.isinf(self.break_even):
            return f"{gain} {step}, pays at no number of stages: auxiliary networks cost more than is shared out"
        return f"{gain} {step}, pays from {self.break_even:.2f} stages on, at most {self.limit:.1f} times as fast"

    def step(self, stages: int) -> float:
        """Predicted seconds per batch with the network spread evenly over `stages` ranks."""
        return self.data + self.overhead + (self.forward + self.backward) / stages

    def speed_up(self, stages: int) -> float:
        """Serial time over `step(stages)`."""
        return self.serial / self.step(stages)

    @property
    def break_even(self) -> float:
        """The number of stages above which there is a gain; infinite if the overhead eats all of it."""
        work = self.forward + self.backward
        return work / (work - self.overhead) if work > self.overhead else math.inf

    @property
    def limit(self) -> float:
        """The speed-up that no number of stages exceeds."""
        floor = self.data + self.overhead
        return self.serial / floor if floor > 0 else math.inf
