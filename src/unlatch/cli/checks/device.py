"""Training on a device: is it there, do tensors come through to the host and back, how fast is it; and a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import Config
from ...io.space import bytes_text
from ...io.versions import versions
from ...nn.device import Accelerator, find_device, present_accelerator
from ...transport.lanes import BACKENDS
from ...transport.launch import Ranks
from ...transport.mail import Message
from ...transport.staging import Staging
from .equality import plain_step, two_processes
from .finding import Finding, Inapplicable
from .trial import Trial

__all__ = ["device_found", "past_the_host", "report", "speed", "transfer"]

_WORDS = 1 << 20
_ROUNDS = 3


def device_found(config: Config) -> str:
    """Which device a process of this machine gets."""
    device = find_device(config.run.device)
    if not isinstance(device, Accelerator):
        seen = present_accelerator()
        return f"{device.type}; torch finds {f'{seen.type} as well' if seen else 'no accelerator'}"
    named = getattr(device.module, "get_device_name", None)
    count = torch.accelerator.device_count()
    return f"{device.torch}{f' ({named(device.torch)})' if named else ''}, one of {count} on this machine"


def transfer(config: Config) -> Finding | str:
    """Tensors go to the host and back as they do between two ranks."""
    device = find_device(config.run.device)
    if not isinstance(device, Accelerator):
        raise Inapplicable("tensors are on the host already")
    staging, rounds, begun = Staging(device), 8, time.perf_counter()
    for number in range(rounds):
        values = torch.arange(_WORDS, dtype=torch.float32) + number
        sent = device.here(values) * 2
        message = staging.leaving(Message("forward", 0, payload=sent)).on_host()
        result: Tensor = staging.landed(staging.arriving(message).payload) + 1
        if not torch.equal(result.cpu(), values * 2 + 1):
            return Finding("transfer", "differs", f"round {number}: what came back is not what was sent")
    seconds = (time.perf_counter() - begun) / rounds
    size = bytes_text(4 * _WORDS)
    return f"{size} to pinned memory and back on side streams, right in {rounds} rounds, {1e3 * seconds:.1f} ms each"


def past_the_host(trial: Trial, ranks: Ranks) -> Finding | str:
    """Two real processes whose tensors go from device to device do what one does."""
    transport = _lanes(trial)
    if transport is None:
        raise Inapplicable(f"nobody is known here who carries tensors from one {trial.device.type} device to another")
    found = two_processes(trial, ranks, transport)
    return replace(found, check="nccl") if isinstance(found, Finding) else found


def _lanes(trial: Trial) -> str | None:
    """The transport that passes tensors from one device of this kind to another."""
    return next((name for name, one in BACKENDS.items() if one.device == trial.device.type), None)


def speed(trial: Trial, ranks: Ranks) -> str:
    """Samples per second: a plain loop, the method inline, and on two ranks where there is a device for each."""
    found = {"plain PyTorch": _fastest(lambda: _plain(trial)), "inline": _fastest(lambda: train_and_time(trial, False))}
    room = not trial.device.runs_ahead or torch.accelerator.device_count() >= 2
    if room and trial.config.run.stages > 1:
        ways: dict[str, str] = {"two processes": trial.config.run.transport}
        if (past := _lanes(trial)) is not None and dist.is_backend_available(BACKENDS[past].name):
            ways[f"two processes over {past}"] = past
        for how, transport in ways.items():
            found[how] = _fastest(lambda way=transport: min(ranks.run(train_and_time, trial, None, way, timeout=300.0)))
    samples = {how: trial.size * trial.count / seconds for how, seconds in found.items()}
    told = ", ".join(f"{how} {rate:,.0f}" for how, rate in samples.items())
    held = trial.device.most_held()
    memory = f"; tensors took {bytes_text(held)} of the device at most" if held is not None else ""
    return f"{told} samples/s, {trial.method.name} on {trial.count} batches of {trial.size}, filling included{memory}"


def _fastest(measure: Any) -> float:
    return min(float(measure()) for _ in range(_ROUNDS))


def train_and_time(trial: Trial, distributed: bool | None, transport: str = "auto") -> float:
    """Seconds for all batches of a trial. Called alike on every rank."""
    return trial.timed(distributed=distributed, transport=transport)


def _plain(trial: Trial) -> float:
    step, batches = plain_step(trial), trial.batches()
    step(0, batches[0])
    begun = time.perf_counter()
    for number, batch in enumerate(batches):
        # Reading the loss waits for the device.
        step(number, batch)
    return time.perf_counter() - begun


def report(config: Config, findings: Sequence[Finding]) -> str:
    """All findings as Markdown, with what they depend on."""
    facts = versions()
    shown = ", ".join(f"{name} {facts[name]}" for name in ("unlatch", "torch", "python", "platform", "cores"))
    lines = [
        f"### unlatch check --device {config.run.device}",
        "",
        shown,
        "",
        f"model {config.model.name}, method {config.method.name}, {config.run.stages} stages, precision "
        f"{config.run.precision}",
        "",
        "| check | verdict | what was seen |",
        "|---|---|---|",
        *(f"| {one.check} | {one.verdict} | {one.text.replace('|', '/')} |" for one in findings),
    ]
    return "\n".join(lines)
