"""Tensors of a device on their way through the memory of the host, beside the computation.

    leaving     main thread       a side stream waits for the compute stream, copies to pinned memory; an event     1
    on_host     sender thread     waits for the event; then, and not before, the bytes are read and sent            2
    arriving    receiver thread   bytes are in pinned memory; another side stream copies to the device; an event    3
    landed      main thread       the compute stream waits for the event; the host does not                         4

What waits in the mail is the copy on the host, which any thread may read without asking the device; what was begun on
its account is found again when the message is taken. Tensors that were on the host at the sender, such as targets on
their way to the last stage, stay on the host.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..nn.device import Accelerator
from ..nn.tree import flatten, map_tensors, unflatten
from .mail import Message

__all__ = ["Leaving", "Staging"]


class Leaving:
    """A message whose tensors are being copied to the host.

    **Arguments:**

    - `message`: with the copies, in which there is nothing to read yet.
    - `source`: the tensors on the device, whose memory must not go to anybody else before they are copied.
    - `there`: the event after which they are; `None` if nothing is copied.
    """

    __slots__ = ("_message", "_source", "_there")

    def __init__(self, message: Message, source: list[Tensor], there: Any) -> None:
        self._message, self._source, self._there = message, source, there

    def on_host(self) -> Message:
        """The message, as soon as it can be read."""
        if self._there is not None:
            self._there.synchronize()
        self._source.clear()
        scalars = self._message.scalars
        return replace(self._message, scalars={k: float(v) for k, v in scalars.items()} if scalars else scalars)

    def follow(self) -> int:
        """Nothing: all of it was in the message."""
        return 0


@dataclass(frozen=True, slots=True)
class _Flight:
    """A tensor on its way to the device, and the event after which it is there."""

    tensor: Tensor
    there: Any


class Staging:
    """Of one process, for all its links.

    **Arguments:** `device`: where its stations compute.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device, self._module = device, device.module
        self._out, self._in = self._module.Stream(device=device.torch), self._module.Stream(device=device.torch)
        self._flights = WeakTensorKeyDictionary()
        self._lock = threading.Lock()
        # What the device may still be copying from, whether or not anybody waits for it.
        self._read: deque[tuple[Any, list[Tensor]]] = deque()

    def room(self, nbytes: int) -> Tensor:
        """Memory of the host for a block that will come, from which the device can copy by itself."""
        return self._device.pinned(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def leaving(self, message: Message) -> Leaving:
        """Begin to copy what a message holds to the host; returns at once."""
        tensors, structure = flatten(message.payload)
        far = [t.device.type == self._device.type for t in tensors]
        source = [t.detach() for t, is_far in zip(tensors, far, strict=True) if is_far]
        there = None
        if source:
            # What makes them comes first.
            self._out.wait_stream(self._module.current_stream())
            with self._module.stream(self._out):
                copies = iter([self._fetched(t) for t in source])
                there = self._module.Event()
                there.record()
            tensors = [next(copies) if is_far else t for t, is_far in zip(tensors, far, strict=True)]
        payload = (unflatten(structure, tensors), far)
        return Leaving(replace(message, payload=payload), source, there)

    def _fetched(self, t: Tensor) -> Tensor:
        host = self._device.pinned(t)
        host.copy_(t, non_blocking=True)
        return host

    def arriving(self, message: Message) -> Message:
        """Begin to copy what came to the device, as far as it was on one; the message itself stays on the host."""
        payload, far = message.payload
        tensors, _ = flatten(payload)
        moving = [t for t, is_far in zip(tensors, far, strict=True) if is_far]
        if moving:
            with self._module.stream(self._in):
                moved = [t.to(self._device.torch, non_blocking=True) for t in moving]
                there = self._module.Event()
                there.record()
            with self._lock:
                while self._read and self._read[0][0].query():
                    self._read.popleft()
                self._read.append((there, moving))
                for t, tensor in zip(moving, moved, strict=True):
                    self._flights[t] = _Flight(tensor, there)
        return replace(message, payload=payload)

    def close(self, *, broken: bool) -> None:
        """Nothing is kept for a peer alone."""

    def landed(self, payload: Any) -> Any:
        """What a message holds, on the device: work that begins now finds it there."""
        return map_tensors(self._landed, payload)

    def _landed(self, t: Tensor) -> Tensor:
        with self._lock:
            flight: _Flight | None = self._flights.pop(t, None)  # type: ignore[no-untyped-call]
        if flight is None:
            return t
        compute = self._module.current_stream()
        compute.wait_event(flight.there)
        # It was made on another stream, which must not give its memory away while this one works with it.
        flight.tensor.record_stream(compute)
        return flight.tensor
