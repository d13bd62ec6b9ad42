"""How many bytes autograd holds: after a forward, or at the worst moment of a backward that frees as it goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["PeakMeter", "Scale"]


class Scale:
    """Weighs distinct storages, leaving out those that are there anyway.

    >>> import torch
    >>> scale = Scale([])
    >>> scale(torch.zeros(4)); scale.total
    16
    """

    def __init__(self, free: Iterable[Tensor]) -> None:
        self._free = {t.untyped_storage().data_ptr() for t in free}
        self._seen: dict[int, int] = {}

    def __call__(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._free:
            self._seen[storage.data_ptr()] = storage.nbytes()

    @property
    def total(self) -> int:
        """Bytes seen so far."""
        return sum(self._seen.values())


class _Held:
    """A saved tensor that reports its release."""

    __slots__ = ("meter", "tensor")

    def __init__(self, tensor: Tensor, meter: PeakMeter) -> None:
        self.tensor, self.meter = tensor, meter

    def __del__(self) -> None:
        self.meter.release(self.tensor)


class PeakMeter:
    """The most bytes held at once while graphs are built and freed inside `measuring`."""

    def __init__(self, free: Iterable[Tensor]) -> None:
        self._free = {t.untyped_storage().data_ptr() for t in free}
        self._count: Counter[int] = Counter()
        self._live = self.peak = 0

    def hold(self, t: Tensor) -> _Held:
        """Count a saved tensor."""
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._free:
            self._count[storage.data_ptr()] += 1
            if self._count[storage.data_ptr()] == 1:
                self._live += storage.nbytes()
                self.peak = max(self.peak, self._live)
        # An output would hold the graph that holds it, and a graph that nobody takes backward would stay for good.
        return _Held(t.detach(), self)

    def release(self, t: Tensor) -> None:
        """Count it off again."""
        storage = t.untyped_storage()
        if storage.data_ptr() not in self._free:
            self._count[storage.data_ptr()] -= 1
            if self._count[storage.data_ptr()] == 0:
                self._live -= storage.nbytes()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Watch everything that autograd saves in the body."""
        with saved_tensors_hooks(self.hold, lambda held: held.tensor):
            yield
