"""A device that is not there: torch's slot for foreign devices, filled from Python, with streams that really run late.

`install()` makes `"fake"` a device of torch in this process, for good, so tests do it in processes of their own.
Tensors on it are wrappers around tensors of the host, and every operation runs there with the same kernels: results
equal those of the CPU bit for bit. What differs is what an accelerator does differently:

- Copies that need not block are only queued, and done when somebody waits for them as the rules say: an event that is
  synchronised, or a stream that waits for one and is used afterwards. Until then the destination holds garbage.
- Streams have vector clocks. An operation on a stream that does not know of the work that made its input is a race, and
  raises; so does an operation on tensors of two devices, and a use on a second stream of memory that belongs to a
  first without `record_stream`.
- Every thread begins with the first device, whatever another thread has chosen; work is done on the device that its
  tensors are on, on the stream that its thread has there. Tensors say `fake:0` of themselves on any of them.
- Random numbers have a generator of their own.
- Whatever makes the host wait for the device is counted.
"""

from __future__ import annotations

import threading
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from unlatch.nn.device import Accelerator

aten = torch.ops.aten
#: What happened so far: streams, events, copies by direction, times that the host waited.
counts: Counter[str] = Counter()
_generator = torch.Generator()
_local = threading.local()
_lock = threading.RLock()
_devices = 1
_pinned: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


class Race(AssertionError):
    """Work that did not wait for what it needs."""


class Stream:
    """Work in order; `clock` says how much of the work of every stream has happened before the next thing here."""

    numbers = iter(range(10**9))

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = _index(device)
        self.number = next(Stream.numbers)
        self.clock: Counter[int] = Counter()
        self.queue: deque[Callable[[], None]] = deque()
        self.put = self.done = 0
        counts["streams"] += 1

    def enqueue(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.put += 1

    def run(self, until: int | None = None) -> None:
        with _lock:
            while self.queue and self.done < (self.put if until is None else until):
                self.done += 1
                self.queue.popleft()()

    def tick(self) -> tuple[int, int]:
        self.clock[self.number] += 1
        return self.number, self.clock[self.number]

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "an event that was never recorded"
        stream, until = event.stream, event.until
        self.enqueue(lambda: stream.run(until))
        self.clock |= event.clock

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self._timed = enable_timing
        counts["events"] += 1

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.until, self.clock, self.at = self.stream.put, Counter(self.stream.clock), time.perf_counter()

    def query(self) -> bool:
        assert self.stream is not None
        return self.stream.done >= self.until

    def synchronize(self) -> None:
        assert self.stream is not None, "an event that was never recorded"
        counts["waits for an event"] += not self.query()
        self.stream.run(self.until)

    def elapsed_time(self, other: Event) -> float:
        assert self._timed
        assert other._timed
        return 1e3 * (other.at - self.at)


def _index(device: Any = None) -> int:
    """The number of a device; of the one that this thread has chosen if there is none in its name."""
    number = device if isinstance(device, int) else torch.device(device).index if device is not None else None
    return getattr(_local, "device", 0) if number is None else number


def set_device(device: Any) -> None:
    _local.device = _index(device)


#: By device, the stream of whoever chooses none.
_defaults = [Stream(0), Stream(1)]


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    chosen: Stream | None = getattr(_local, "streams", {}).get(index)
    return chosen or _defaults[index]


@contextmanager
def stream(one: Stream) -> Iterator[None]:
    device, streams = _index(), getattr(_local, "streams", {})
    _local.device, _local.streams = one.device, {**streams, one.device: one}
    try:
        yield
    finally:
        _local.device, _local.streams = device, streams


class _Memory:
    """Where a tensor is: which work wrote it last, whose memory it is, and who may use it beside."""

    def __init__(self, owner: Stream) -> None:
        self.owner, self.written = owner, (owner.number, 0)
        self.users = {owner.number}


class Fake(torch.Tensor):
    """A tensor of the device. `host` has its values, as far as they are there yet."""

    @staticmethod
    def __new__(cls, host: torch.Tensor, memory: _Memory) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device="fake:0",
        )

    def __init__(self, host: torch.Tensor, memory: _Memory) -> None:
        self.host, self.memory = host.detach(), memory

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _lock:
            return _perform(func, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, one: Stream) -> None:
        self.memory.users.add(one.number)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    @property
    def data(self) -> Fake:
        return Fake(self.host, self.memory)

    @data.setter
    def data(self, other: Fake) -> None:
        if not isinstance(other, Fake):
            raise RuntimeError("a parameter of the fake device was given values of another one")
        self.host, self.memory = other.host, other.memory

    def __repr__(self) -> str:
        return f"Fake({tuple(self.shape)})"


def _used(t: Fake, now: Stream, func: Any) -> torch.Tensor:
    """The values of an input, if work on this stream may use them."""
    maker, tick = t.memory.written
    if now.clock[maker] < tick:
        raise Race(f"{func} on stream {now.number} reads what stream {maker} makes, and does not wait for it")
    if t.memory.owner not in _defaults and now.number not in t.memory.users:
        raise Race(f"{func}: memory of stream {t.memory.owner.number} is used on {now.number} without record_stream")
    return t.host


def _perform(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    given = [t for t in flat if isinstance(t, Fake)]
    now = current_stream(given[0].memory.owner.device) if given else current_stream()
    if func is aten.copy_.default:
        return _copy(now, args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
    if func is aten._to_copy.default:
        return _to_copy(now, args[0], kwargs)
    strangers = [t for t in flat if isinstance(t, torch.Tensor) and not isinstance(t, Fake) and t.dim() > 0]
    if given and strangers and "index" not in str(func):
        raise RuntimeError(f"{func}: expected all tensors on one device, got fake:0 and {strangers[0].device}")
    if func is aten._local_scalar_dense.default:
        counts["waits for a value"] += 1
    now.run()
    memories = {t.host.untyped_storage().data_ptr(): t.memory for t in given}
    wrappers = {id(t.host): t for t in given}

    def host(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return _used(value, now, func) if isinstance(value, Fake) else value

    found = _dropout(func, *tree_map(host, args), **tree_map(host, kwargs))
    stamp, mutable = now.tick(), func._schema.is_mutable
    for t in given if mutable else ():
        # Which of them it wrote does not matter: all were in order.
        t.memory.written = stamp

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Fake):
            return value
        if id(value) in wrappers:
            return wrappers[id(value)]
        memory = memories.get(value.untyped_storage().data_ptr()) if value.numel() else None
        if memory is None:
            memory = _Memory(now)
            memory.written = stamp
        return Fake(value, memory)

    return tree_map(wrapped, found)


def _dropout(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Dropout as the CPU computes it, with random numbers of the device; anything else as it is."""
    if func is aten.native_dropout.default:
        x, p = args[0], args[1]
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=_generator).div_(1 - p)
        return x * noise, noise
    if func is aten.native_dropout_backward.default:
        return args[0] * args[1]
    return func(*args, **kwargs)


def _is_pinned(t: torch.Tensor) -> bool:
    return t.untyped_storage().data_ptr() in _pinned


def _transfer(now: Stream, to: torch.Tensor, source: torch.Tensor, later: bool, owner: Stream) -> None:
    """Copy values now, or when the stream gets there. Memory of another stream, and of the host, is not kept by that.

    **Arguments:** `owner`: of the side that is on the device.
    """
    if not later:
        counts["waits for a copy"] += 1
        now.run()
        to.copy_(source)
        return
    if (gap := _poison(to)) is not None:
        gap()
    places = weakref.ref(to.untyped_storage()), weakref.ref(source.untyped_storage())
    # What a stream frees it uses again only in its own order.
    kept = (source if _is_pinned(to) else to) if owner is now else None
    of = [(t.dtype, t.size(), t.stride(), t.storage_offset()) for t in (to, source)]

    def work() -> None:
        alive = [place() for place in places]
        if None in alive:
            raise Race("memory was given back while a copy from or to it was under way")
        target, origin = (
            torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)  # type: ignore[call-overload]
            for storage, (dtype, size, stride, offset) in zip(alive, of, strict=True)
        )
        target.copy_(origin)

    now.enqueue(lambda held=kept: work())


def _poison(t: torch.Tensor) -> Callable[[], Any] | None:
    return (lambda: t.fill_(float("nan"))) if t.is_floating_point() else (lambda: t.fill_(1)) if t.numel() else None


def _copy(now: Stream, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    if isinstance(to, Fake) and isinstance(source, Fake):
        now.run()
        _used(to, now, "copy_").copy_(_used(source, now, "copy_"))
    elif isinstance(to, Fake):
        counts["copies to the device"] += 1
        _transfer(now, _used(to, now, "copy_"), source, non_blocking and _is_pinned(source), to.memory.owner)
    else:
        counts["copies to the host"] += 1
        assert isinstance(source, Fake)
        _transfer(now, to, _used(source, now, "copy_"), non_blocking and _is_pinned(to), source.memory.owner)
        return to
    to.memory.written = now.tick()
    return to


def _to_copy(now: Stream, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    device = kwargs.get("device")
    plain = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format") and v is not None}
    there = device.type == "fake" if device is not None else isinstance(source, Fake)
    if isinstance(source, Fake) and there:
        now.run()
        memory = _Memory(now)
        memory.written = now.tick()
        return Fake(aten._to_copy.default(_used(source, now, "to"), **plain), memory)
    if there:
        counts["copies to the device"] += 1
        values = aten._to_copy.default(source, **plain)
        memory = _Memory(now)
        if kwargs.get("non_blocking") and _is_pinned(source) and plain.get("dtype") in (None, source.dtype):
            _transfer(now, values, source, later=True, owner=now)
        memory.written = now.tick()
        return Fake(values, memory)
    counts["copies to the host"] += 1
    counts["waits for a copy"] += 1
    now.run()
    assert isinstance(source, Fake)
    return aten._to_copy.default(_used(source, now, "to"), **plain)


def _pinned_like(self: Accelerator, like: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(like.host if isinstance(like, Fake) else like, device="cpu")
    _pinned[made.untyped_storage().data_ptr()] = made.untyped_storage()
    if (poison := _poison(made)) is not None:
        poison()
    return made


def _made(func: Any) -> Callable[..., Fake]:
    """A factory of torch for the device."""

    def make(*args: Any, **kwargs: Any) -> Fake:
        now = current_stream(kwargs.get("device"))
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
        memory = _Memory(now)
        memory.written = now.tick()
        return Fake(func(*args, device="cpu", **kwargs), memory)

    return make


def _count() -> int:
    return _devices


def _module() -> types.ModuleType:
    module = types.ModuleType("torch.fake")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=_count,
        current_device=_index,
        set_device=set_device,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        manual_seed=_generator.manual_seed,
        manual_seed_all=_generator.manual_seed,
        get_rng_state=lambda device=None: _generator.get_state(),
        set_rng_state=lambda state, device=None: _generator.set_state(state),
        synchronize=lambda device=None: _defaults[_index(device)].run(),
        Stream=Stream,
        Event=Event,
        stream=stream,
        current_stream=current_stream,
        max_memory_allocated=lambda device=None: 1,
    )
    return module


_libraries: list[torch.library.Library] = []


def install(devices: int = 1) -> None:
    """Make it a device of this process. **Arguments:** `devices`: how many of them there seem to be."""
    global _devices
    _devices = devices
    if _libraries:
        return
    _setup_privateuseone_for_python_backend("fake", backend_module=_module())
    library = torch.library.Library("aten", "IMPL")
    library.impl(
        "_to_copy", lambda x, **kwargs: _to_copy(current_stream(kwargs.get("device")), x, kwargs), "PrivateUse1"
    )
    library.impl("empty.memory_format", _made(aten.empty.memory_format), "PrivateUse1")
    library.impl("empty_strided", _made(aten.empty_strided.default), "PrivateUse1")
    _libraries.append(library)
    Accelerator.pinned = _pinned_like  # type: ignore[method-assign]
    torch.Tensor.is_pinned = lambda t, device=None: _is_pinned(t)  # type: ignore[method-assign, assignment]
    torch.Tensor.pin_memory = lambda t, device=None: _pinned_like(None, t).copy_(t)  # type: ignore[method-assign]
    torch.accelerator.device_count = _count  # type: ignore[assignment]
