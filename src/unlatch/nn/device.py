"""Where a process computes, and all that depends on it, in one place.

`Device` is the CPU, where every question has a trivial answer: nothing is moved, a loss is a number at once, time is
the clock on the wall. `Accelerator` is any device that works on its own time, beside the host: values are copied when
somebody needs them, a loss is a number once it is read, and time is told by events on the device. Stages, engine and
links ask one of the two and never the type of a device.

Streams, events, random numbers and memory come from torch's module of the device (`torch.get_device_module`), so any
accelerator that has such a module will do. None was at hand when this was written: `docs/devices.md` says what ran.
"""

from __future__ import annotations

import copy
import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .tree import Tree, copied, map_tensors

__all__ = [
    "CPU",
    "HALVES",
    "Accelerator",
    "Device",
    "Mark",
    "Reading",
    "check_device",
    "check_on_host",
    "device_of",
    "find_device",
    "present_accelerator",
]

M = TypeVar("M", bound=nn.Module)
#: What forwards are cast to, by the name of the precision.
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Device:
    """The CPU; other devices derive from it.

    >>> x = torch.ones(2)
    >>> CPU.here(x) is x, CPU.reading(x.sum())
    (True, 2.0)
    """

    #: Whether work here is only begun by the host, which goes on meanwhile.
    runs_ahead = False

    def __init__(self, where: torch.device | str = "cpu") -> None:
        self.torch = torch.device(where)

    @property
    def type(self) -> str:
        """Its kind, as torch calls it."""
        return self.torch.type

    def __repr__(self) -> str:
        return f"<Device {self.torch}>"

    def __deepcopy__(self, memo: Any) -> Device:
        # There is one of it, whoever is copied.
        return self

    def choose(self) -> None:
        """Make it the one that this thread means when it names none: every thread begins with the first of its kind."""

    # ----------------------------------------------------------------- numbers

    def autocast(self, precision: str) -> AbstractContextManager[Any]:
        """A context in which forwards run in `precision`; `"fp32"` leaves everything alone.

        >>> with CPU.autocast("bf16"):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
        """
        half = HALVES.get(precision)
        return nullcontext() if half is None else torch.autocast(self.type, half)

    def seed(self, seed: int) -> Any:
        """Seed random numbers of the device. **Returns:** what `unseed` puts back."""
        return None

    def unseed(self, before: Any) -> None:
        """Let random numbers go on where they were before `seed`."""

    def clock(self) -> Any:
        """This moment, as what `float` turns into seconds."""
        return time.perf_counter()

    def reading(self, number: Tensor) -> Any:
        """One number, as what `float` turns into it: here at once, elsewhere when it is asked for."""
        return float(number)

    # ------------------------------------------------------------------ places

    def here(self, tree: Tree) -> Tree:
        """The same with every tensor on this device."""
        return tree

    def on_host(self, tree: Tree) -> Tree:
        """The same with every tensor in the memory of the host."""
        return tree

    def copied(self, tree: Tree) -> Tree:
        """Copies of every tensor in the memory of the host; what was shared still is."""
        return copied(tree)

    def own(self, module: M) -> M:
        """A module as a stage uses it: itself, or a copy on the device."""
        return module

    def moved(self, module: M) -> M:
        """A module that nobody else uses, moved to the device."""
        return module

    # ------------------------------------------------------------------ memory

    def most_held(self) -> int | None:
        """Bytes that tensors took at most on the device; unknown for the host, whose memory is not counted apart."""
        return None


CPU = Device()


class Reading:
    """A number on its way from the device. Nobody waits for it before somebody asks.

    **Arguments:** `host`: where it will be; `there`: the event after which it is.
    """

    __slots__ = ("_host", "_there")

    def __init__(self, host: Tensor, there: Any) -> None:
        self._host, self._there = host, there

    def __float__(self) -> float:
        self._there.synchronize()
        return float(self._host)


class Mark:
    """A moment in the work of a device: the seconds on the clock of the host at which it was reached there.

    **Arguments:** `event`: recorded there; `origin`: an earlier one; `at`: when that was reached.
    """

    __slots__ = ("_at", "_event", "_origin")

    def __init__(self, event: Any, origin: Any, at: float) -> None:
        self._event, self._origin, self._at = event, origin, at

    @property
    def reached(self) -> bool:
        """Whether the device has come so far."""
        return bool(self._event.query())

    def __float__(self) -> float:
        self._event.synchronize()
        return self._at + float(self._origin.elapsed_time(self._event)) / 1e3


class Accelerator(Device):
    """A device that works on its own time.

    **Arguments:** `where`: with its number.
    """

    runs_ahead = True

    def __init__(self, where: torch.device | str) -> None:
        super().__init__(where)
        #: Torch's module of the device: streams, events, random numbers, memory.
        self.module = torch.get_device_module(self.torch)
        self._origin: Any = None
        self._at = 0.0

    def choose(self) -> None:
        self.module.set_device(self.torch)

    def _event(self) -> Any:
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def clock(self) -> Mark:
        """This moment in the work of the device."""
        if self._origin is None:
            self._origin = self._event()
            self._origin.synchronize()
            self._at = time.perf_counter()
        return Mark(self._event(), self._origin, self._at)

    def seed(self, seed: int) -> Any:
        before = self.module.get_rng_state(self.torch)
        self.module.manual_seed(seed)
        return before

    def unseed(self, before: Any) -> None:
        self.module.set_rng_state(before, self.torch)

    def pinned(self, like: Tensor) -> Tensor:
        """Room for a tensor in memory of the host that the device copies from and to by itself.

        Torch caches such memory, and gives it to nobody else while a copy that it knows of is under way.
        """
        return torch.empty_like(like, device="cpu", pin_memory=True)

    def reading(self, number: Tensor) -> Reading:
        number = number.detach()
        host = self.pinned(number)
        host.copy_(number, non_blocking=True)
        there = self.module.Event()
        there.record()
        return Reading(host, there)

    def here(self, tree: Tree) -> Tree:
        # Only from pinned memory does a copy go on while the host does something else.
        return map_tensors(lambda t: t.to(self.torch, non_blocking=t.device.type == "cpu" and t.is_pinned()), tree)

    def on_host(self, tree: Tree) -> Tree:
        return map_tensors(Tensor.cpu, tree)

    def copied(self, tree: Tree) -> Tree:
        known: dict[int, Tensor] = {}

        def fetched(t: Tensor) -> Tensor:
            if id(t) not in known:
                known[id(t)] = t.detach().to("cpu", copy=True)
            return known[id(t)]

        return map_tensors(fetched, tree)

    def own(self, module: M) -> M:
        return self.moved(copy.deepcopy(module))

    def moved(self, module: M) -> M:
        return module.to(self.torch)

    def most_held(self) -> int | None:
        held = getattr(self.module, "max_memory_allocated", None)
        return int(held(self.torch)) if held is not None else None


@cache
def _accelerator(where: torch.device) -> Accelerator:
    return Accelerator(where)


def device_of(tensor: Tensor) -> Device:
    """The device that a tensor is on.

    >>> device_of(torch.ones(1)) is CPU
    True
    """
    return CPU if tensor.device.type in ("cpu", "meta") else _accelerator(tensor.device)


def find_device(asked: str | torch.device = "auto", *, ranks: int = 1) -> Device:
    """The device of this process.

    **Arguments:**

    - `asked`: `"auto"` for an accelerator if torch finds one and the CPU otherwise; `"cpu"`; the kind of an
      accelerator, of which each process of a machine takes its own by `LOCAL_RANK`; or one device by its number.
    - `ranks`: processes of the run.

    >>> find_device("cpu")
    <Device cpu>
    """
    where = check_device(asked)
    if where.type == "cpu":
        return CPU
    accelerator = _accelerator(torch.device(where.type, _number(asked, where, ranks)))
    accelerator.choose()
    return accelerator


def present_accelerator() -> torch.device | None:
    """The kind of accelerator on this machine that has streams, events and a choice of device, if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = torch.get_device_module(found) if found is not None else None
    return found if all(hasattr(module, name) for name in ("Stream", "Event", "set_device")) else None


def check_device(asked: str | torch.device, processes: int = 1) -> torch.device:
    """Refuse a device that is not there, and more processes than devices of a machine; nothing is begun on it.

    **Returns:** the device, or its kind.
    """
    found = present_accelerator()
    where = _named(asked) if asked != "auto" else found or torch.device("cpu")
    if where.type == "cpu":
        return where
    if found is None or found.type != where.type:
        has = f"it has {found.type}" if found is not None else "it has none"
        raise ConfigError(
            f"device={str(asked)!r}: torch {torch.__version__} finds no {where.type} device on this machine ({has}): "
            f'use device="{found.type if found is not None else "cpu"}", or a build of torch for {where.type}'
        )
    if processes > (count := torch.accelerator.device_count()):
        raise ConfigError(
            f"more ranks than devices: {processes} processes are to share the {count} {where.type} device(s) of this "
            f'machine: start at most {count}, or use device="cpu"'
        )
    return where


def check_on_host(model: nn.Module) -> None:
    """Refuse a model that is on a device already: stages are moved one by one, each to the device of its rank."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.device.type not in ("cpu", "meta"):
            raise ConfigError(
                f"the model is on {t.device} ({name}): build it on the CPU and say device={t.device.type!r}; each rank "
                "then moves its own stages to its own device"
            )


def _named(asked: str | torch.device) -> torch.device:
    try:
        return torch.device(asked)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f'device must be "auto", "cpu", the kind of an accelerator such as "cuda", or one of them such as '
            f'"cuda:1", got {asked!r} ({reason})'
        ) from None


def _number(asked: str | torch.device, where: torch.device, ranks: int) -> int:
    """Which of the devices of this machine this process takes."""
    count = torch.accelerator.device_count()
    local = int(os.environ.get("LOCAL_RANK", "0")) if ranks > 1 else 0
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) if ranks > 1 else 1
    # Torch's own types say that there is always one.
    number: int | None = where.index
    if number is not None:
        if here > 1:
            raise ConfigError(
                f"device={str(asked)!r} is one device, and {here} ranks run on this machine: name the kind, "
                f"device={where.type!r}, and each rank takes its own"
            )
        if number >= count:
            raise ConfigError(
                f"device={str(asked)!r}: this machine has {count} {where.type} device(s), numbered from 0 to "
                f"{count - 1}"
            )
        return number
    if local >= count:
        raise ConfigError(
            f"more ranks than devices: this is rank {local} of {here or 'several'} on this machine (counted from 0), "
            f"which has {count} {where.type} device(s): start at most {count} processes here, or use "
            'device="cpu"'
        )
    return local
