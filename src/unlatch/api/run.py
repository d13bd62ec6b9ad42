"""A training run: the same object on every rank, whether there is one or many."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import DataError, UnlatchError
from ..methods import Method
from ..nn.chain import Model, as_module, state_names
from ..nn.tree import Tree, batch_size
from ..plan import Plan
from ..runtime.engine import Engine, Finished
from ..runtime.evaluation import evaluate
from ..runtime.events import Event
from ..runtime.health import Health
from ..runtime.recalibration import recalibrating
from ..runtime.stage import StageOptions
from ..runtime.station import Station
from ..runtime.transport import Link
from ..runtime.world import World
from ..schedule import Schedule
from . import snapshot
from .advice import advise_method
from .batching import Compensation
from .probe import Comparison, GradientProbe
from .reversal import TOLERANCE, ReconstructionWatch
from .statistics import StageStatistics, gather_statistics

__all__ = ["Epoch", "Run", "StepResult"]

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


@dataclass(frozen=True)
class Epoch:
    """One pass over the data: mean training loss, samples per second while training, evaluation results."""

    epoch: int
    loss: float
    samples: int
    samples_per_second: float
    evaluation: dict[str, float] = field(default_factory=dict)


class Run:
    """Made by `unlatch.parallelize`; a context manager that closes itself.

    Every method is called on every rank. Data is read only where stage 0 lives: elsewhere `step(None, None)` and
    `fit(None)` do.
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
        self._watch = ReconstructionWatch(engine.stages.values(), getattr(method, "tolerance", TOLERANCE))
        #: Passes over the data that are complete.
        self.epochs = 0
        #: Samples fed in the pass that `stop` cut short; 0 between passes.
        self.samples_into_epoch = 0
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

    def _result(self, finished: list[Finished]) -> StepResult:
        self.notes += self._watch.news()
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

    def fit(
        self,
        loader: Loader | None,
        epochs: int = 1,
        eval_loader: Loader | None = None,
        *,
        on_step: Callable[[StepResult], None] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Epoch]:
        """Train for some epochs; the pipeline stays filled between them and is emptied at the end.

        **Arguments:**

        - `loader`: yields `(x, y)`; iterated once per epoch on the leading rank only, after `set_epoch` if it has it.
        - `eval_loader`: evaluated after every epoch, at the newest weights.
        - `on_step`, `on_epoch`: called with each `StepResult` and `Epoch`.
        - `stop`: asked on the leading rank before every batch that begins an update: never inside of an accumulation
          or of batches that are processed as one. Once it says yes, nothing further is fed. The pass under way is then
          neither evaluated nor counted; `samples_into_epoch` says how far it came. The loader may have been asked for
          one batch more than that.

        **Returns:** the epochs that were completed: fewer than asked for if `stop` said so.
        """
        history: list[Epoch] = []
        for last in (n == epochs - 1 for n in range(epochs)):
            set_epoch = getattr(loader, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epochs)
            with self._reporting():
                done = self._one_epoch(loader, last, on_step or _ignore, stop or _never)
            if done is None:
                return history
            found = self.evaluate(eval_loader) if self._evaluates(eval_loader) else {}
            epoch = Epoch(self.epochs, done.mean_loss, done.samples, done.samples / done.seconds, found)
            self.epochs, self.samples_into_epoch = self.epochs + 1, 0
            history.append(epoch)
            if on_epoch is not None:
                on_epoch(epoch)
        return history

    def _one_epoch(
        self, loader: Loader | None, last: bool, on_step: Callable[[StepResult], None], stop: Callable[[], bool]
    ) -> _Pass | None:
        """**Returns:** `None` if `stop` cut it short."""
        total, start = _Pass(), time.perf_counter()
        for finished in self._fed(loader, stop, total):
            total.add(finished)
            on_step(self._result(finished))
        # Only the leader has seen why the data ended.
        total.stopped, self.samples_into_epoch = self._world.broadcast((total.stopped, self.samples_into_epoch))
        if total.outlived and not total.stopped:
            raise DataError(
                f"the loader of stage {self._engine.lowest} goes on after {self._engine.batches} batches, where that "
                'of stage 0 ended: with data="build" every rank needs a loader of the same batches'
            )
        if last or total.stopped:
            total.add(self._engine.drain())
            self.notes += self._watch.news()
        total.seconds = time.perf_counter() - start
        return None if total.stopped else total

    def _fed(self, loader: Loader | None, stop: Callable[[], bool], total: _Pass) -> Iterator[list[Finished]]:
        """The leader feeds its loader's batches; the others follow until it announces the end."""
        engine, collect = self._engine, self._compensation
        if not engine.leads:
            while (finished := engine.step()) is not None:
                yield finished
            return
        if loader is None:
            raise UnlatchError("fit needs a loader on the rank that holds stage 0")
        empty = True
        for batch in loader:
            empty = False
            if not (isinstance(batch, tuple | list) and len(batch) == 2):
                raise DataError(
                    f"fit needs a loader of pairs (x, y), got {type(batch).__name__} from it; adapt the loader"
                )
            # Asked with the next batch at hand: without one the pass is complete, and there is nothing to cut short.
            if engine.holds_first and collect.is_empty and engine.between_updates and stop():
                total.stopped = True
                break
            self.samples_into_epoch += batch_size(batch[0])
            unit = collect.add(*batch)
            if unit is not None:
                finished = engine.step(*unit)
                if finished is None:
                    total.outlived = True
                    return
                yield finished
        if empty:
            raise DataError("the loader gave no batch: is it an iterator that was used up, or the data set empty?")
        rest = collect.rest()
        if rest is not None:
            yield engine.step(*rest) or []
        engine.announce_end()

    def _evaluates(self, loader: Loader | None) -> bool:
        return self._world.broadcast(loader is not None)

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
        return self._engine.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where the run was whose `state` this is; nothing may be under way here."""
        self._engine.load(state)

    def save(self, path: str | Path) -> None:
        """Empty the pipeline and write a checkpoint for any number of stages, any method and plain PyTorch."""
        self.flush()
        self._engine.recorder.pause()
        loop = {
            "epochs": self.epochs,
            "samples_into_epoch": self.samples_into_epoch,
            "method": repr(self.method),
            "split": self.plan.split,
            "joined": self._compensation.count,
        }
        snapshot.save(Path(path), self._engine, self._names, self._world, loop, self.plan.starts)

    def load(self, path: str | Path, *, optimizer: bool = True) -> None:
        """Continue from a checkpoint: weights and, unless told otherwise, optimizer, learning rates and counters."""
        self.flush()
        loop = snapshot.load(
            Path(path), self._engine, self._names, self._world, self.plan.starts, optimizer=optimizer
        )
        if optimizer:
            self.epochs, self.samples_into_epoch = int(loop.get("epochs", 0)), int(loop.get("samples_into_epoch", 0))

    # ------------------------------------------------------------------- end

    def close(self) -> None:
        """Take leave of the other ranks. Called by the context manager."""
        if self._health is not None:
            self._health.close()
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


class _Pass:
    """Sums over the batches that finished in one pass over the data."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self.stopped = False
        # Where every rank reads data of its own: whether the first one had no more while this one did.
        self.outlived = False
        self._loss = 0.0

    def add(self, finished: Iterable[Finished]) -> None:
        for batch in finished:
            self.samples += batch.samples
            self._loss += batch.loss * batch.samples

    @property
    def mean_loss(self) -> float:
        return self._loss / max(1, self.samples)


def _by_stage(measured: Any) -> int:
    return int(measured.stage)


def _ignore(_: object) -> None:
    pass


def _never() -> bool:
    return False


def _first_line(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
