"""Evaluation is a schedule too: batches go up, sums of metrics come down, so that every process knows the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.pairs import pairs
from ..errors import DataError
from ..nn.tree import batch_size, map_tensors
from ..schedule import OUTSIDE, Entry, Kind, Periodic, Port
from ..transport.mail import ACK, EVALUATE, Mail, Micro
from .engine import Engine, Order
from .station import Operation, Station

__all__ = ["evaluate", "evaluation_schedule"]

Sums = dict[str, float]
E = Kind("E", "forward")
ANSWER = Kind("Answer")


def evaluation_schedule(stages: int) -> Periodic:
    """Every stage evaluates a batch, and answers one that the stages above it have answered: at most as many are under
    way as there are stages above.

    >>> " ".join(f"{entry}+{entry.offset}" for entry in evaluation_schedule(2).entries)
    '0E+0 1E+0 1Answer+0 0Answer+1'
    """
    entries = []
    for stage in range(stages):
        # Not the box of training's data: some may wait there.
        takes = Port(EVALUATE, stage - 1 if stage else OUTSIDE)
        gives = (Port(EVALUATE, stage + 1),) if stage < stages - 1 else ()
        entries.append(Entry(E, stage, 0, (takes,), gives))
    for stage in reversed(range(stages)):
        takes_answer = (Port(ACK, stage + 1),) if stage < stages - 1 else ()
        gives_answer = (Port(ACK, stage - 1),) if stage else ()
        entries.append(Entry(ANSWER, stage, stages - 1 - stage, takes_answer, gives_answer))
    return Periodic(stages, tuple(entries))


class _Evaluating(Station):
    """One part of the way through the network; adds up what it is answered."""

    def __init__(self, index: int, part: Any, last: bool, loss_fn: Callable[[Any, Any], Tensor]) -> None:
        super().__init__(index)
        self.sums: Sums = {"samples": 0.0, "loss": 0.0, "correct": 0.0, "predictions": 0.0}
        self._part, self._last, self._loss_fn = part, last, loss_fn
        self._measured: Sums = {}

    def operations(self) -> Mapping[Kind, Operation]:
        return {E: self.up, ANSWER: self.down}

    def up(self, micro: Micro, arrived: tuple[Any, Any]) -> Sequence[Any]:
        """Evaluate a batch, and at the end measure it."""
        x, y = arrived
        x = self._part.evaluate(x)
        if not self._last:
            return ((x, y),)
        self._measured = _measure(x, y, self._loss_fn)
        return ()

    def down(self, micro: Micro, *answer: Sums) -> Sequence[Any]:
        """Add up the sums of a batch and hand them down."""
        found = answer[0] if answer else self._measured
        for name, value in found.items():
            self.sums[name] += value
        self.losses[micro.id] = found["loss"]
        return () if self.index == 0 else (found,)


def evaluate(
    route: Mapping[int, Any],
    stages: int,
    mail: Mail,
    loader: Iterable[tuple[Any, Any]] | None,
    *,
    devices: Sequence[int] = (),
    loss_fn: Callable[[Any, Any], Tensor],
) -> Sums:
    """Mean loss and accuracy over a loader, at the newest weights of every stage.

    **Arguments:**

    - `route`: the parts of the way that are in this process, by stage.
    - `loader`: read only where stage 0 lives.
    - `devices`: for each stage its process.
    """
    stations = {index: _Evaluating(index, part, index == stages - 1, loss_fn) for index, part in route.items()}
    if not stations:
        return {}
    engine = Engine(stations, evaluation_schedule(stages), mail, devices=devices)
    if engine.leads:
        if loader is None:
            raise DataError("evaluate needs a loader on the rank that holds stage 0, got None")
        for x, y in pairs(loader, "evaluate"):
            engine.step(x, y)
        engine.announce(Order.END)
    else:
        while engine.step() is not Order.END:
            pass
    engine.drain()
    return _summary(next(iter(stations.values())).sums)


def _measure(outputs: Any, target: Any, loss_fn: Callable[[Any, Any], Tensor]) -> Sums:
    """Sums over one batch; accuracy where outputs are class scores and targets class numbers."""
    with torch.no_grad():
        outputs = map_tensors(lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, outputs)
        count = batch_size(outputs)
        sums = {"samples": float(count), "loss": float(loss_fn(outputs, target)) * count}
        if isinstance(outputs, Tensor) and isinstance(target, Tensor) and not target.is_floating_point():
            axis = _class_axis(outputs, target)
            if axis is not None:
                sums["correct"] = float((outputs.argmax(axis) == target).sum())
                sums["predictions"] = float(target.numel())
        return sums


def _class_axis(outputs: Tensor, target: Tensor) -> int | None:
    """Where the classes are: torch puts them second, language models last."""
    if target.dim() != outputs.dim() - 1:
        return None
    if target.shape == outputs.shape[:1] + outputs.shape[2:]:
        return 1
    return -1 if target.shape == outputs.shape[:-1] else None


def _summary(sums: Sums) -> Sums:
    samples = max(1.0, sums["samples"])
    result = {"loss": sums["loss"] / samples, "samples": sums["samples"]}
    if sums["predictions"]:
        result["accuracy"] = sums["correct"] / sums["predictions"]
    return result
