"""Faults at the work of stages: the operations of an engine, wrapped when a run with faults is built."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from ..nn.tree import Tree, flatten, unflatten
from ..schedule import OUTSIDE, Entry
from ..transport.faults import Fault, Faults, InjectedFault, Trigger
from ..transport.mail import Micro
from .engine import Engine
from .station import Operation, Station

__all__ = ["break_engine", "check_faults"]

_BACKWARD = ("backward", "input gradient", "weight gradient")


def break_engine(engine: Engine, faults: Faults) -> None:
    """Let faults strike the stations of an engine."""
    triggers = [Trigger(fault, faults.log) for fault in faults if fault.message is None]

    def around(station: Station, entry: Entry, work: Operation) -> Operation:
        for trigger in triggers:
            if trigger.fault.stage == station.number and _matches(trigger.fault, entry):
                # An update is made once for several batches, of which it follows the last.
                span = engine.accumulate if entry.per == "update" else 1
                work = _struck(trigger, station, work, span)
        return work

    engine.wrap(around)


def _matches(fault: Fault, entry: Entry) -> bool:
    cost = entry.kind.cost
    return fault.during is None or fault.during == cost or (fault.during == "backward" and cost in _BACKWARD)


def _struck(trigger: Trigger, station: Station, work: Operation, span: int) -> Operation:
    @functools.wraps(work)
    def operation(micro: Micro, *taken: Any) -> Any:
        if trigger.pulled(micro.batch, span):
            taken = _strike(trigger, station, micro, taken)
        return work(micro, *taken)

    return operation


def _strike(trigger: Trigger, station: Station, micro: Micro, taken: tuple[Any, ...]) -> tuple[Any, ...]:
    fault = trigger.fault
    match fault.what:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stall":
            _stall(fault.seconds)
        case "fail":
            raise InjectedFault(fault.text)
        case "delay":
            trigger.linger()
        case "poison" if fault.part == "input":
            return tuple(_poisoned(taken, float(fault.value)))
        case "poison":
            _poison_stage(station, fault)
    return taken


def _stall(seconds: float | None) -> None:
    """Stop this process with all its threads; another one wakes it, if it is to be woken."""
    own = os.getpid()
    waker = subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {own}"]) if seconds is not None else None
    os.kill(own, signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def _poisoned(taken: Tree, value: float) -> Tree:
    tensors, structure = flatten(taken)
    for index, t in enumerate(tensors):
        if t.is_floating_point() and t.numel():
            # Not in place: it may be the caller's own batch.
            tensors[index] = spoilt = t.clone()
            spoilt.reshape(-1)[:1] = value
            return unflatten(structure, tensors)
    raise ConfigError("there is no floating-point number to poison in the input of this stage: choose another stage")


def _poison_stage(station: Station, fault: Fault) -> None:
    params = station.stage.params if station.stage is not None else []
    tensors = [p.grad if fault.part == "gradient" else p for p in params]
    for t in tensors:
        if t is not None and t.numel():
            with torch.no_grad():
                t[(0,) * t.dim()] = float(fault.value)
            return
    raise ConfigError(f"{station.title} has no {fault.part} to poison: choose another stage")


def check_faults(faults: Faults, engine: Engine, *, inline: bool) -> None:
    """Refuse faults that could not strike, rather than run a test that tests nothing."""
    schedule, devices = engine.schedule, engine.devices
    for fault in faults:
        if fault.stage >= schedule.stations:
            raise ConfigError(f"cannot {fault}: there are stages 0 to {schedule.stations - 1}")
        if inline and (fault.what in ("kill", "stall") or fault.message is not None):
            raise ConfigError(
                f"cannot {fault}: in one process there is nobody to notice, and no message on a wire. Start ranks "
                "(unlatch.launch), or use fail, poison or delay"
            )
        entries = [entry for entry in schedule.entries if entry.station == fault.stage]
        if fault.message is not None:
            here = devices[fault.stage]
            arriving = {p.name for e in entries for p in e.takes if p.station != OUTSIDE and devices[p.station] != here}
            _need(fault, fault.message, arriving, "messages from other ranks")
        elif fault.during is not None and not any(_matches(fault, entry) for entry in entries):
            _need(fault, fault.during, {entry.kind.cost for entry in entries}, "work")


def _need(fault: Fault, wanted: str, known: Iterable[str], of: str) -> None:
    if wanted not in known:
        raise ConfigError(f"cannot {fault}: no {wanted!r} among its {of} ({', '.join(sorted(known)) or 'none'})")
