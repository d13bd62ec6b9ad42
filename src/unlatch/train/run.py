"""A training run: the same object on every rank, whether there is one or many."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..advise.advice import advise_method
from ..errors import DataError
from ..methods import Method
from ..nn.chain import Model, as_module, state_names
from ..nn.tree import Tree, batch_size
from ..plan import Plan
from ..runtime.engine import Engine, Finished
from ..runtime.evaluation import evaluate
from ..runtime.events import Event
from ..runtime.recalibration import recalibrating
from ..runtime.stage import StageOptions
from ..runtime.station import Station
from ..schedule import Schedule
from ..transport.health import Health
from ..transport.link import Link
from ..transport.world import World
from . import snapshot
from .batching import Compensation
from .probe import Comparison, GradientProbe
from .reversal import ReconstructionWatch
from .statistics import StageStatistics, gather_statistics

__all__ = ["Loader", "Run", "StepResult"]

Loader = Iterable[tuple[Any, Any]]


@dataclass(frozen=True)
class StepResult:
    """What a step brought to an end, the same on every rank.

    **Arguments:**

    - `batch`, `loss`: the batch that finished in this step and its mean loss; `None` while a pipeline fills.
    - `staleness`: for each stage of this process, by how many updates its forward was behind its backward.
    - `step`: batches fed so far.
    """

    step: int
    batch: int | None = None
    loss: float | None = None
    staleness: dict[int, int] = field(default_factory=dict)


class Run:
    """Made by `unlatch.parallelize`; a context manager that closes itself.

    Every method is called on every rank. Data is read only where stage 0 lives: elsewhere `step()` does.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        plan: Plan,
        options: StageOptions,
        engine: Engine,
        world: World,
        links: list[Link],
        health: Health | None,
        compensation: Compensation,
    ) -> None:
        self.method = method
        self.plan = plan
        self._model = as_module(model)
        self._options = options
        self._engine = engine
        self._world = world
        world.heed(engine.mail.failure)
        self._links = links
        self._health = health
        self._compensation = compensation
        self._names = {s.index: state_names(s.module, model) for s in engine.stages.values()}
        optimizers = [s.updater.optimizer for s in engine.stages.values() if s.updater.optimizer is not None]
        self.advice = advise_method(method, engine.schedule.stages, optimizers[0] if optimizers else None)
        self._watch = ReconstructionWatch(engine.stages.values(), method.reconstruction_tolerance)
        self.notes: list[str] = []

    # --------------------------------------------------------------- training

    def step(self, x: Tree = None, y: Tree = None) -> StepResult:
        """Feed one batch and report the batch that finished."""
        with self._reporting():
            if self._engine.leads:
                batch_size((x, y))
            unit = self._compensation.add(x, y, self._engine.leads)
            finished = self._engine.step(*unit) if unit is not None else []
            return self._result(finished or [])

    def hear_watch(self) -> None:
        """Add to the notes what a method's watch has seen since the last time."""
        self.notes += self._watch.news()

    def _result(self, finished: list[Finished]) -> StepResult:
        self.hear_watch()
        if not finished:
            return StepResult(self._engine.batches)
        last = finished[-1]
        return StepResult(self._engine.batches, last.batch, last.loss, last.staleness)

    def flush(self) -> list[StepResult]:
        """Finish all batches under way and return what they brought."""
        with self._reporting():
            finished = []
            rest = self._compensation.rest()
            if rest is not None:
                finished += self._engine.step(*rest) or []
            finished += self._engine.drain()
            return [self._result([f]) for f in finished]

    def evaluate(self, loader: Loader | None, *, path: str | None = None) -> dict[str, float]:
        """Mean loss, and accuracy for class targets, at the newest weights; batches under way are not disturbed.

        **Arguments:** `path`: another way through the network than the serial one, where a method has one
        (`"auxiliary"` under `auxnet`).
        """
        with self._reporting():
            self._engine.recorder.pause()
            return self._evaluate(self._engine.route(path), loader)

    def evaluate_recalibrated(self, loader: Loader | None, batches: Loader | None) -> dict[str, float]:
        """Evaluate as the run is, and again with statistics of batch norm estimated on these training batches.

        The results of the second evaluation are called `recalibrated_...`; the run keeps its own statistics.
        """
        with self._reporting():
            self._engine.recorder.pause()
            found = self._evaluate(self._engine.route(), loader)
            with recalibrating(self._engine.stages, self._engine.route()) as estimating:
                if not self._evaluate(estimating, batches)["samples"]:
                    raise DataError("there was no batch to estimate the statistics of batch norm on")
                again = self._evaluate(self._engine.route(), loader)
            return found | {f"recalibrated_{name}": value for name, value in again.items() if name != "samples"}

    def _evaluate(self, route: dict[int, Any], loader: Loader | None) -> dict[str, float]:
        engine = self._engine
        stages = engine.schedule.stages
        devices = engine.devices[:stages]
        found = evaluate(route, stages, engine.mail, loader, devices=devices, loss_fn=self._options.loss_fn)
        # A rank without a stage of its own takes no part.
        return found if len(set(devices)) == self._world.size else self._world.broadcast(found)

    # ---------------------------------------------------------------- results

    def module(self) -> nn.Module:
        """The model that was passed in, with the newest weights of every stage under its original names."""
        own = snapshot.model_state(self._engine.stages.values(), self._names)
        merged = {name: t for part in self._world.gather(own) for name, t in part.items()}
        with torch.no_grad():
            for name, t in self._model.state_dict(keep_vars=True).items():
                if name in merged and name not in own:
                    t.data.copy_(merged[name])
        return self._model

    @property
    def schedule(self) -> Schedule:
        """What all stations do, in which order; `events` are its entries at work."""
        return self._engine.schedule

    @property
    def stations(self) -> Mapping[int, Station]:
        """What works in this process, by number: its stages, with whatever the method gave them beside."""
        return MappingProxyType(self._engine.stations)

    @property
    def events(self) -> list[Event]:
        """What the stages of this process did, newest last."""
        return list(self._engine.recorder.events)

    def statistics(self) -> list[StageStatistics]:
        """Staleness, bubble, memory and traffic of every stage, on every rank."""
        return gather_statistics(self._engine, self.method, self._world, self._links)

    def method_statistics(self) -> list[Any]:
        """What the method measured about itself, for every stage, on every rank; empty for most methods."""
        return sorted((s for part in self._world.gather(self._engine.method_statistics()) for s in part), key=_by_stage)

    def probe_gradients(
        self,
        *,
        at: Collection[int] | None = None,
        every: int | None = None,
        on_found: Callable[[list[Comparison]], None] | None = None,
    ) -> GradientProbe:
        """From now on compare the gradients of some updates with exact backpropagation; inline runs only.

        **Arguments:** `at`: numbers of updates; or `every`: so many updates. `on_found`: called with each result.

        **Returns:** the probe; its `found` lists all comparisons.
        """
        return GradientProbe(self._engine, at=at, every=every, on_found=on_found)

    # ------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Copies of everything that this process has under way, as a tree of tensors and plain values.

        A run that is built alike and takes it over with `restore` goes on bit for bit as this one does.
        """
        return {**self._engine.state(), "joining": self._compensation.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where the run was whose `state` this is; nothing may be under way here."""
        self._engine.load(state)
        self._compensation.load(state["joining"])

    def save(self, path: str | Path, progress: Mapping[str, int] | None = None) -> None:
        """Empty the pipeline and write a checkpoint for any number of stages, any method and plain PyTorch.

        **Arguments:** `progress`: numbers that a session wants to find again.
        """
        self.flush()
        self._engine.recorder.pause()
        loop = {
            **(progress or {}),
            "method": repr(self.method),
            "split": self.plan.split,
            "joined": self._compensation.count,
        }
        snapshot.save(Path(path), self._engine, self._names, self._world, loop, self.plan.starts)

    def load(self, path: str | Path, *, optimizer: bool = True) -> dict[str, Any]:
        """Continue from a checkpoint: weights and, unless told otherwise, optimizer, learning rates and counters.

        **Returns:** what the checkpoint says of the run that wrote it, with the `progress` of its session.
        """
        self.flush()
        return snapshot.load(
            Path(path), self._engine, self._names, self._world, self.plan.starts, optimizer=optimizer
        )

    # ------------------------------------------------------------------- end

    def close(self) -> None:
        """Take leave of the other ranks. Called by the context manager."""
        # Signs of life are given, and others watched, until all links are closed.
        for link in self._links:
            link.close()
        self._links = []
        self._world.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.close()
        elif self._health is not None:
            self._health.leave_note(_first_line(error))

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Before an error leaves this rank, tell the others what it was."""
        try:
            yield
        except BaseException as error:
            if self._health is not None:
                self._health.leave_note(_first_line(error))
            raise


def _by_stage(measured: Any) -> int:
    return int(measured.stage)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
