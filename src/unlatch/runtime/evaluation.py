"""Evaluation is a schedule too: batches go up, sums of metrics come down, so that every process knows the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..data.pairs import pairs
from ..errors import ConfigError, DataError, ShapeMismatch, StageFailed, UnlatchError
from ..metrics import DEFAULT, Metric, name_of, summary_of, sums_of
from ..nn.device import CPU, Device
from ..nn.tree import batch_size, map_tensors
from ..rules.losses import LossFunction, measured
from ..schedule import OUTSIDE, Entry, Kind, Periodic, Port
from ..transport.mail import ACK, EVALUATE, Mail, Micro
from .engine import Engine, Order
from .station import Operation, Station

__all__ = ["evaluate", "evaluation_schedule"]

#: By name, what was added up and what it is divided by. Names of metrics begin with the number of theirs.
Sums = dict[str, tuple[float, float]]
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

    def __init__(
        self, index: int, part: Any, last: bool, loss_fn: LossFunction, metrics: Sequence[Metric], device: Device
    ) -> None:
        super().__init__(index)
        self._device = device
        self.sums: Sums = {"samples": (0.0, 1.0), "loss": (0.0, 0.0)}
        self._part, self._last = part, last
        self._loss_fn, self._metrics = loss_fn, metrics
        self._measured: Sums = {}

    def operations(self) -> Mapping[Kind, Operation]:
        return {E: self.up, ANSWER: self.down}

    def up(self, micro: Micro, arrived: tuple[Any, Any]) -> Sequence[Any]:
        """Evaluate a batch, and at the end measure it."""
        x, y = arrived
        x = self._part.evaluate(x)
        if not self._last:
            return ((x, y),)
        with torch.no_grad():
            self._measured = self._measure(_in_full_precision(x), self._device.here(y), micro)
        return ()

    def down(self, micro: Micro, *answer: Sums) -> Sequence[Any]:
        """Add up the sums of a batch and hand them down."""
        found = answer[0] if answer else self._measured
        for name, (total, count) in found.items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = before[0] + total, before[1] + count
        self.losses[micro.id] = found["loss"][0]
        return () if self.index == 0 else (found,)

    def _measure(self, output: Any, target: Any, micro: Micro) -> Sums:
        samples = float(batch_size(output))
        mean, count = measured(self._loss_fn(output, target))
        weight = samples if count is None else count
        sums: Sums = {"samples": (samples, 0.0), "loss": (float(mean) * weight, weight)}
        for number, metric in enumerate(self._metrics):
            with _naming(metric, f" at stage {self.index} in batch {micro.batch} of the evaluation"):
                found = sums_of(metric, output, target, samples)
            sums |= {f"{number}/{name}": pair for name, pair in found.items()}
        return sums


def evaluate(
    route: Mapping[int, Any],
    stages: int,
    mail: Mail,
    loader: Iterable[tuple[Any, Any]] | None,
    *,
    devices: Sequence[int] = (),
    loss_fn: LossFunction,
    metrics: Sequence[Metric] = DEFAULT,
    like: Engine | None = None,
) -> dict[str, float]:
    """Mean loss and metrics over a loader, at the newest weights of every stage.

    **Arguments:**

    - `route`: the parts of the way that are in this process, by stage.
    - `loader`: read only where stage 0 lives.
    - `devices`: for each stage its process.
    - `metrics`: called where the last stage lives, and the same everywhere, since all add up.
    - `like`: the engine that trains here, on whose device evaluation runs.
    """
    device = like.device if like is not None else CPU
    stations = {
        index: _Evaluating(index, part, index == stages - 1, loss_fn, metrics, device) for index, part in route.items()
    }
    if not stations:
        return {}
    engine = Engine(stations, evaluation_schedule(stages), mail, devices=devices, **(like.place() if like else {}))
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
    return _summary(next(iter(stations.values())).sums, metrics)


def _in_full_precision(output: Any) -> Any:
    return map_tensors(lambda t: t.float() if t.dtype in (torch.bfloat16, torch.float16) else t, output)


@contextmanager
def _naming(metric: Metric, where: str) -> Iterator[None]:
    """Whatever goes wrong with a metric says with which, and where."""
    try:
        yield
    except UnlatchError as error:
        raise ShapeMismatch(f"metric {name_of(metric)}{where}: {error}") from error
    except Exception as error:
        raise StageFailed(f"metric {name_of(metric)}{where} raised {type(error).__name__}: {error}") from error


def _summary(sums: Sums, metrics: Sequence[Metric]) -> dict[str, float]:
    samples, (loss, weight) = sums["samples"][0], sums["loss"]
    # Of nothing there is no mean: a number would pass for a good result.
    result = {"loss": loss / weight if weight else math.nan, "samples": samples}
    for number, metric in enumerate(metrics):
        start = f"{number}/"
        own = {name.removeprefix(start): pair for name, pair in sums.items() if name.startswith(start)}
        with _naming(metric, " over all batches of the evaluation"):
            found = summary_of(metric, own) if own else {}
        if twice := sorted(found.keys() & result.keys()):
            raise ConfigError(
                f"metric {name_of(metric)} reports {twice[0]!r}, which is there already; name it otherwise"
            )
        result |= found
    return result
