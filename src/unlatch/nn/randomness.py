"""Random numbers that depend on (seed, stage, micro-batch) and on nothing else.

A forward that is done again must draw the same dropout masks, and a run must not depend on which process draws first.
So each forward of a stage runs inside `replayable`: torch's global generators, that of the host and that of the stage's
device, are seeded from the three numbers, and on the way out they are put back exactly as they were.
"""

from __future__ import annotations

from types import TracebackType

import torch

from .device import CPU, Device

__all__ = ["mixed_seed", "replayable"]

_MASK = (1 << 64) - 1


def mixed_seed(seed: int, stage: int, micro: int) -> int:
    """A 64-bit seed in which a change of any argument changes about half of the bits.

    >>> mixed_seed(0, 1, 2) != mixed_seed(0, 2, 1)
    True
    """
    state = 0
    for part in (seed, stage, micro):
        # One round of the splitmix64 finaliser per part; the odd constant keeps (0, 0, 0) away from the fixed point 0.
        state = (state ^ part) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class replayable:  # noqa: N801 - used like a function
    """A context whose random numbers are a function of `(seed, stage, micro)`.

    Covers torch's CPU generator and that of `device`. Python's and NumPy's generators are left alone. Contexts may be
    nested.

    >>> with replayable(0, stage=1, micro=5):
    ...     first = torch.rand(3)
    >>> with replayable(0, stage=1, micro=5):
    ...     again = torch.rand(3)
    >>> torch.equal(first, again)
    True
    """

    __slots__ = ("_cpu", "_device", "_seed", "_there")

    def __init__(self, seed: int, stage: int, micro: int, device: Device = CPU) -> None:
        self._seed = mixed_seed(seed, stage, micro)
        self._device = device

    def __enter__(self) -> None:
        generator = torch.default_generator
        self._cpu = generator.get_state()
        generator.manual_seed(self._seed)
        self._there = self._device.seed(self._seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.default_generator.set_state(self._cpu)
        self._device.unseed(self._there)
