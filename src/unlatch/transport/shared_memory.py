"""Memory that two ranks of one machine both see: a tensor is copied once on its way in, and not at all on its way out.

A *slot* holds one tensor at a time. The sender makes it when none of its size is free, and tells the receiver of it by
passing a file descriptor. The receiver's tensor lies in the slot itself; when nobody uses it any more, a byte in front
of it says so, and the sender may fill it again. So there are as many slots as tensors are in use at once, and no
message is needed to give one back.

The memory has no name in any file system (`memfd_create`), so it ends with the processes that see it, however they end.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import TransportError

__all__ = ["SHARES_MEMORY", "Incoming", "Outgoing", "strided"]

#: Whether this system has what slots are made of.
SHARES_MEMORY = hasattr(os, "memfd_create")
# The byte that says whether a slot is in use has a cache line for itself, and tensors begin where torch's own would.
_HEAD = 64
# A slot of fewer bytes would not need less memory.
_LEAST = 4096


def strided(buffer: memoryview, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor in `buffer`, which it keeps alive."""
    flat = torch.frombuffer(buffer, dtype=dtype)
    return flat if len(shape) == 1 and shape[0] == flat.shape[0] else flat.as_strided(shape, strides)


class _Slot:
    """As its sender sees it."""

    __slots__ = ("_memory", "_tensor", "busy", "number")

    def __init__(self, number: int, memory: memoryview) -> None:
        self.number = number
        self.busy = memory[:1]
        self._memory = memory
        self._tensor = torch.empty(0)

    def fill(self, t: Tensor) -> None:
        """Put a dense tensor into it."""
        room = self._tensor
        if room.shape != t.shape or room.dtype != t.dtype or room.stride() != t.stride():
            room = strided(self._memory[_HEAD : _HEAD + t.nbytes], t.dtype, t.shape, t.stride())
            self._tensor = room
        self.busy[0] = 1
        room.copy_(t)


class Outgoing:
    """Slots for tensors that leave for one peer.

    **Arguments:** `announce`: tells the peer of a new slot: its number, its bytes, and the file that it is.
    """

    def __init__(self, announce: Callable[[int, int, int], None]) -> None:
        self._announce = announce
        self._count = 0
        #: Bytes of all tensors so far.
        self.placed = 0
        self._pools: dict[int, deque[_Slot]] = {}

    def place(self, t: Tensor) -> int:
        """Copy a dense tensor that is not empty to where the peer finds it. **Returns:** the number of its slot."""
        capacity = max(_LEAST, 1 << (_HEAD + t.nbytes - 1).bit_length())
        pool = self._pools.get(capacity)
        if pool is None:
            pool = self._pools[capacity] = deque()
        for _ in range(len(pool)):
            slot = pool[0]
            # What was filled first is given back first, as a rule.
            pool.rotate(-1)
            if not slot.busy[0]:
                break
        else:
            slot = self._made(capacity)
            pool.append(slot)
        slot.fill(t.detach() if t.requires_grad else t)
        self.placed += t.nbytes
        return slot.number

    def _made(self, capacity: int) -> _Slot:
        try:
            # Pages that nothing was written to take no memory.
            file = os.memfd_create("unlatch")
            try:
                os.ftruncate(file, capacity)
                memory = memoryview(mmap.mmap(file, capacity))
                slot = _Slot(self._count, memory)
                self._announce(slot.number, capacity, file)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:
            raise TransportError(f"there is no shared memory of {capacity} bytes for a message: {error}") from error
        self._count += 1
        return slot


class _SeenSlot:
    """As its receiver sees it."""

    __slots__ = ("_busy", "_held", "_process", "memory")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._busy = memory[:1]
        self._held: weakref.ref[memoryview] | None = None
        self._process = os.getpid()

    def hold(self, nbytes: int) -> memoryview:
        """What a tensor lies in; the slot is free when nothing refers to it any more."""
        held = self.memory[_HEAD : _HEAD + nbytes]
        self._held = weakref.ref(held, self._free)
        return held

    def _free(self, _: object) -> None:
        # A worker of a DataLoader inherits whatever there was, and lets go of it when it likes.
        if os.getpid() == self._process:
            self._busy[0] = 0


class Incoming:
    """Slots of tensors that come from one peer."""

    def __init__(self) -> None:
        self._slots: dict[int, _SeenSlot] = {}

    def add(self, number: int, capacity: int, file: int) -> None:
        """Take note of a slot that the peer has made; the file is closed."""
        try:
            self._slots[number] = _SeenSlot(memoryview(mmap.mmap(file, capacity)))
        except (OSError, ValueError) as error:
            raise TransportError(f"shared memory of {capacity} bytes cannot be seen here: {error}") from error
        finally:
            os.close(file)

    def tensor(
        self, number: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> Tensor:
        """The tensor in a slot. It stays there: nothing is copied."""
        slot = self._slots.get(number)
        if slot is None or _HEAD + nbytes > len(slot.memory):
            raise TransportError(f"a message names {nbytes} bytes in slot {number}, which are not there")
        try:
            return strided(slot.hold(nbytes), dtype, shape, strides)
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransportError(
                f"a message announces a tensor of {dtype} with shape {tuple(shape)} and strides {tuple(strides)}, "
                f"which its {nbytes} bytes do not hold"
            ) from error
