"""Tensors from device to device, past the host, on process groups of their own; headers still travel over gloo.

    leaving     main thread       an event after the work that makes the tensors                           1
    on_host     sender thread     waits for the event; then, and not before, the header is sent            2
    follow      sender thread     posts the sends, and waits on a stream until they are over               3
    arriving    receiver thread   has read the header, so room can be made on the device; posts the
                                  receives, waits on a stream until they are over; only then the mail      4
    landed      main thread       the compute stream waits for the event of the arrival; the host not      5

Such backends have one stream on either side for each pair of ranks and group, in which operations wait for each other,
and a send is over when its receive is. So every direction of every pair of neighbours has a group and a side stream of
its own: a send never queues up behind a receive, nor a message of one peer behind that of another. All groups are made,
and used once, at the start and in the same order on all ranks; both ends also give them back in one order.

What is in the mail has come in full. A peer that dies in the middle of a tensor leaves threads waiting, and never the
stream that computes; checkpoints copy the mail without asking what is still on its way; a mark, which travels as a
header, comes after the tensors that were sent before it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigError, TransportError, UnlatchError
from ..nn.device import Accelerator, Device
from ..nn.tree import Tree, flatten, map_tensors, unflatten
from .forms import Count, dtype_named, shaped
from .mail import Message
from .together import Alarm, together
from .wire import dense, flat, room
from .world import World

__all__ = ["BACKENDS", "Backend", "Lane", "Lanes", "check_transport"]


@dataclass(frozen=True)
class Backend:
    """Who carries tensors. **Arguments:** `name`: as torch calls it; `device`: the kind of device that it serves."""

    name: str
    device: str


# Seconds for what gives a group back: a peer that is gone may never take part in it.
_PARTING = 10.0
#: Transports with lanes, by the name that a user gives.
BACKENDS = {"nccl": Backend("nccl", "cuda")}


def check_transport(transport: str, device: str) -> None:
    """Refuse a transport that is none, or that cannot serve this kind of device.

    >>> check_transport("nccl", "cpu")
    Traceback (most recent call last):
        ...
    unlatch.errors.ConfigError: transport='nccl' passes tensors from one cuda device to another, and this run ...
    """
    backend = BACKENDS.get(transport)
    if backend is None:
        if transport not in ("auto", "gloo"):
            raise ConfigError(f'transport must be "auto", "gloo" or "nccl", got {transport!r}')
        return
    if device != backend.device:
        raise ConfigError(
            f"transport={transport!r} passes tensors from one {backend.device} device to another, and this run "
            f'computes on {device}: leave transport out, or use device="{backend.device}" where each process has one'
        )
    if not dist.is_backend_available(backend.name):
        raise ConfigError(
            f"transport={transport!r}: torch {torch.__version__} was built without {backend.name}: install a build of "
            "torch that has it, or leave transport out, and tensors go through pinned memory of the host"
        )


class _Layout(BaseModel):
    """A payload without what goes over a lane. **Arguments:** `tensors`: `None` for those that stay in the message."""

    model_config = ConfigDict(strict=True, extra="forbid")

    structure: str | list[Any]
    tensors: list[tuple[str, list[Count], list[Count]] | None]


@lru_cache(256)
def _layout(text: str) -> _Layout:
    try:
        return _Layout.model_validate_json(text)
    except ValidationError as error:
        raise TransportError(f"the layout of a payload cannot be read: {error.errors()[0]['msg']}") from error


class Lanes:
    """Of one process, to all its neighbours.

    **Arguments:** `device`: where its stations compute.
    """

    def __init__(self, device: Device) -> None:
        self.device, self.module = device, torch.get_device_module(device.torch)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._rank = 0
        self._alarm: Alarm = lambda: None
        self._arrivals = WeakTensorKeyDictionary()
        self._lock = threading.Lock()

    def open(self, world: World, ways: Sequence[tuple[int, int]], backend: Backend) -> None:
        """Make all groups. Called by all ranks together, with the same `ways`: the ranks that send, and to whom."""
        self._rank = world.rank
        if world.health is not None:
            self._alarm = world.health.failure
        self._groups = world.connect(ways, backend.name, self._try_out)

    def _try_out(self, group: dist.ProcessGroup, way: tuple[int, int]) -> None:
        """Send one byte: backends connect when they are first used, and get stuck if ranks do that in other orders."""
        self.device.choose()
        with self.module.stream(self.stream()):
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device.torch)
            here = way[0] == self._rank
            _over(dist.isend(byte, way[1], group=group) if here else dist.irecv(byte, way[0], group=group))
            tried = self.module.Event()
            tried.record()
        tried.synchronize()

    def stream(self) -> Any:
        """A side stream of the device, whichever this thread has chosen."""
        return self.module.Stream(device=self.device.torch) if self.device.runs_ahead else self.module.Stream()

    def to(self, peer: int) -> Lane:
        """Both directions between this rank and another one."""
        return Lane(self, peer, self._groups.get((self._rank, peer)), self._groups.get((peer, self._rank)))

    def give_back(self, peer: int, *, broken: bool) -> None:
        """End both directions between this rank and another one, within a bounded time.

        To end a group may take both of its ranks, as NCCL's does. So they do it in one order: first the group in which
        the lower rank sends.

        **Arguments:** `broken`: whether operations may be left that nothing will end.
        """
        low, high = sorted((self._rank, peer))
        for way in ((low, high), (high, low)):
            group = self._groups.pop(way, None)
            if group is None or (not broken and self._over(partial(dist.destroy_process_group, group), self._alarm)):
                continue
            # Older versions of torch have none; to destroy the group would wait for what does not come.
            if (abort := getattr(group, "abort", None)) is not None:
                self._over(abort, lambda: None)

    def _over(self, how: Callable[[], None], alarm: Alarm) -> bool:
        """Whether a group comes to its end so, before there is an alarm or time is up."""
        deadline = time.monotonic() + _PARTING

        def end() -> None:
            self.device.choose()
            how()

        def too_late() -> Exception | None:
            late = time.monotonic() > deadline
            return TransportError(f"a group did not end within {_PARTING:g} s") if late else alarm()

        # At the end of a program newer versions of Python begin no thread; the group then ends with the process.
        with suppress(UnlatchError, RuntimeError):
            together(end, too_late)
            return True
        return False

    def arrived(self, tensors: Sequence[Tensor], there: Any) -> None:
        """Note the event after which tensors are there, for streams that know nothing of it."""
        with self._lock:
            for t in tensors:
                self._arrivals[t] = there

    def landed(self, payload: Tree) -> Tree:
        """What a message holds, for work that begins now."""
        return map_tensors(lambda t: self._known(t, forget=True), payload)

    def copied(self, payload: Tree) -> Tree:
        """Copies of what a message holds, in the memory of the host."""
        return self.device.copied(map_tensors(lambda t: self._known(t, forget=False), payload))

    def _known(self, t: Tensor, *, forget: bool) -> Tensor:
        """Have the stream of this thread wait for a tensor, and keep its memory meanwhile."""
        with self._lock:
            there: Any = self._arrivals.pop(t, None) if forget else self._arrivals.get(t)  # type: ignore[no-untyped-call]
        if there is not None:
            stream = self.module.current_stream(self.device.torch)
            stream.wait_event(there)
            if self.device.runs_ahead:
                t.record_stream(stream)
        return t


class _Leaving:
    """A message whose tensors the device may still be making.

    **Arguments:** `tensors`: those that go over the lane; `ready`: the event after which they are made.
    """

    __slots__ = ("_lane", "_message", "_ready", "_tensors")

    def __init__(self, lane: Lane, message: Message, tensors: list[Tensor], ready: Any) -> None:
        self._lane, self._message, self._tensors, self._ready = lane, message, tensors, ready

    def on_host(self) -> Message:
        """The message, as soon as what it announces can be sent."""
        self._ready.synchronize()
        scalars = self._message.scalars
        return replace(self._message, scalars={k: float(v) for k, v in scalars.items()} if scalars else scalars)

    def follow(self) -> int:
        """Send the tensors; returns when the peer has them. **Returns:** their bytes."""
        self._lane.send(self._tensors, self._ready)
        return sum(t.nbytes for t in self._tensors)


class Lane:
    """Both directions to one peer. Made by `Lanes.to`."""

    def __init__(
        self, lanes: Lanes, peer: int, outward: dist.ProcessGroup | None, inward: dist.ProcessGroup | None
    ) -> None:
        self._lanes, self._peer = lanes, peer
        self._outward, self._inward = outward, inward
        self._module, self._where = lanes.module, lanes.device.torch
        self._out, self._in = lanes.stream(), lanes.stream()

    def room(self, nbytes: int) -> Tensor:
        """Memory of the host for tensors that were on the host at the sender."""
        device = self._lanes.device
        if not isinstance(device, Accelerator):
            return room(nbytes)
        device.choose()
        # From pinned memory they come to the device without the host waiting for it.
        return device.pinned(torch.empty(nbytes, dtype=torch.uint8, device="meta"))

    def leaving(self, message: Message) -> _Leaving:
        """Take note of what a message holds; returns at once."""
        tensors, structure = flatten(message.payload)
        far = [t.device.type == self._where.type for t in tensors]
        moving = [dense(t.detach()) for t, is_far in zip(tensors, far, strict=True) if is_far]
        described = iter([(str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())) for t in moving])
        layout = {"structure": structure, "tensors": [next(described) if is_far else None for is_far in far]}
        staying = (t for t, is_far in zip(tensors, far, strict=True) if not is_far)
        ready = self._module.Event()
        ready.record(self._module.current_stream(self._where))
        return _Leaving(self, replace(message, payload=(json.dumps(layout), *staying)), moving, ready)

    def send(self, tensors: Sequence[Tensor], ready: Any) -> None:
        """Send tensors, and wait until they are sent. **Arguments:** `ready`: the event after which they are made."""
        if not tensors:
            return
        self._lanes.device.choose()
        with self._module.stream(self._out):
            self._out.wait_event(ready)
            for t in tensors:
                if t.numel():
                    _over(dist.isend(flat(t), self._peer, group=self._used(self._outward, "to")))
            sent = self._module.Event()
            sent.record()
        # Until then nobody else may have their memory, and the next header would be early.
        sent.synchronize()

    def arriving(self, message: Message) -> Message:
        """Receive what a message announces; returns when it is there."""
        self._lanes.device.choose()
        text, *staying = message.payload
        layout = _layout(text)
        tensors: list[Tensor] = []
        moved: list[Tensor] = []
        beside = iter(staying)
        with self._module.stream(self._in):
            for announced in layout.tensors:
                if announced is None:
                    tensors.append(next(beside))
                    continue
                dtype, (_, shape, strides) = dtype_named(announced[0]), announced
                block = room(torch.Size(shape).numel() * dtype.itemsize, self._where)
                if block.numel():
                    _over(dist.irecv(block, self._peer, group=self._used(self._inward, "from")))
                moved.append(shaped(block, dtype, shape, strides))
                tensors.append(moved[-1])
            there = self._module.Event()
            there.record()
        there.synchronize()
        self._lanes.arrived(moved, there)
        return replace(message, payload=unflatten(layout.structure, tensors))

    def _used(self, group: dist.ProcessGroup | None, how: str) -> dist.ProcessGroup:
        if group is None:
            raise TransportError(f"tensors are to go {how} rank {self._peer}, where the schedule names no message")
        return group

    def close(self, *, broken: bool) -> None:
        """Give the groups back. **Arguments:** `broken`: whether operations may be left that nothing will end."""
        self._outward = self._inward = None
        self._lanes.give_back(self._peer, broken=broken)


def _over(work: dist.Work | None) -> None:
    """Have the stream wait for an operation; backends without streams have the host wait."""
    if work is not None:
        work.wait()
