"""A training run: the same object on every rank, whether there is one or many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import nn

from ..advise.advice import advise
from ..errors import DataError, Interrupted, PeerLost, StageFailed, TransportError, UnlatchError
from ..methods import Method
from ..metrics import DEFAULT, Metric, checked, fitted
from ..nn.chain import as_module
from ..nn.tree import Tree, batch_size, copied
from ..plan import Plan
from ..runtime.blueprint import Blueprint
from ..runtime.engine import Engine, Finished, Order
from ..runtime.evaluation import evaluate
from ..runtime.events import Event
from ..runtime.recalibration import recalibrating
from ..runtime.stage import Stage
from ..runtime.station import Station
from ..runtime.updating import Optimizer
from ..schedule import Schedule
from ..transport.ending import ended, opened
from ..transport.health import Health
from ..transport.link import Carrier
from ..transport.mail import Voided
from ..transport.reports import report_progress
from ..transport.rounding import Format
from ..transport.world import World
from . import snapshot
from .batching import Compensation
from .guard import Guard
from .intake import Intake
from .keeping import Keeping
from .probe import Comparison, GradientProbe
from .reversal import ReconstructionWatch
from .saving import Saving
from .statistics import StageStatistics, gather_statistics

__all__ = ["Loader", "Run", "StepResult"]

log = logging.getLogger("unlatch")

Loader = Iterable[Any]
# Seconds by which a rank ends after the one that it lost.
_ECHO = 1.0


@dataclass(frozen=True)
class StepResult:
    """What a step brought to an end, the same on every rank.

    **Arguments:**

    - `batch`, `loss`: the batch that finished in this step and its mean loss; `None` while a pipeline fills.
    - `staleness`: for each stage of this process, by how many updates its forward was behind its backward.
    - `step`: batches fed so far, without those left out.
    - `left_out`: batches left out so far because something was not finite.
    """

    step: int
    batch: int | None = None
    loss: float | None = None
    staleness: dict[int, int] = field(default_factory=dict)
    left_out: int = 0


class Run:
    """Made by `unlatch.parallelize`; a context manager that closes itself.

    Every method is called on every rank. Data is read only where stage 0 lives: elsewhere `step()` does.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        method: Method,
        engine: Engine,
        links: list[Carrier],
        health: Health | None,
        rebuild: Callable[[Method, Plan, Format, int], Run],
    ) -> None:
        self.method = method
        self.plan = blueprint.plan
        self._model = as_module(blueprint.model)
        self._options = blueprint.options
        self._engine = engine
        self._world = blueprint.world
        self._links = links
        self._health = health
        self._intake = Intake(
            blueprint.model,
            blueprint.blocks,
            blueprint.plan.starts,
            own_loss=blueprint.own_loss,
            # One rank tries the first batch for all.
            proven=blueprint.sample is not None or not engine.holds_first,
            device=engine.device,
        )
        self._compensation = Compensation(method.joined)
        self._keeping = Keeping(blueprint, method, engine, links, self._compensation, rebuild)
        stages = engine.stages.values()
        optimizers = {s.index: s.updater.optimizer for s in stages if s.updater.optimizer is not None}
        samples = None if blueprint.sample is None else batch_size(blueprint.sample)
        #: What the delays of the method cost under this optimizer.
        self.advice = advise(method, engine.schedule.stages, optimizers, samples)
        self._watch = ReconstructionWatch(engine.stages.values(), method.reconstruction_tolerance)
        self._saving: Saving | None = None
        self._aside: World | None = None
        self._asked: int | None = None
        self.notes: list[str] = []
        #: What is measured in evaluations that do not ask for something else.
        self.metrics: tuple[Metric, ...] = DEFAULT
        #: Metrics that are known to fit the model and its own loss.
        self.known_metrics: tuple[Metric, ...] = ()
        describe = health.describe if health is not None else str
        self._guard = Guard(
            self._options.nonfinite,
            engine,
            links,
            self._world,
            self._keeping.exact,
            self.finish_saving,
            describe,
            self.notes.append,
        )
        self._world.heed(self._guard.alarm)
        if self._world.group is not None:
            opened(self)

    # --------------------------------------------------------------- training

    def step(self, x: Tree = None, y: Tree = None) -> StepResult:
        """Feed one batch and report the batch that finished.

        **Arguments:** `x`, `y`: inputs and targets; or one dict, for a model whose library has such batches.
        """
        with self._reporting("step"):
            if self._engine.leads:
                x, y = self._taken_in(x, y)
                batch_size((x, y))
            self._guard.keep()
            unit = self._compensation.add(x, y, self._engine.leads)
            return self._result(self._fed(unit) if unit is not None else [])

    def _taken_in(self, x: Tree, y: Tree = None) -> tuple[Tree, Tree]:
        """The one way in for batches."""
        return self._intake(x, y)

    def _batches_of(self, loader: Loader, what: str) -> Iterator[tuple[Tree, Tree]]:
        """The batches of a loader, taken in one by one."""
        return self._intake.pairs(loader, what)

    def _follow_first_column(self) -> None:
        """What the user set in an optimizer holds for its stage in all replicas that are here."""
        first = self.optimizers
        for stage in self._engine.stages.values():
            own = stage.updater.optimizer
            if own is None or own is first[stage.index]:
                continue
            for group, like in zip(own.param_groups, first[stage.index].param_groups, strict=True):
                group.update({name: value for name, value in like.items() if name != "params"})

    def _fed(self, unit: tuple[Tree, Tree]) -> list[Finished]:
        if self._engine.columns.count > 1:
            self._follow_first_column()
        finished = self._guard.feed(*unit)
        # An order comes from a session on the leading rank, which then reads the data itself.
        return [] if isinstance(finished, Order) else finished

    @property
    def batches(self) -> int:
        """How many were fed so far, those before a checkpoint that was loaded included, those left out not."""
        return self._engine.batches

    @property
    def left_out(self) -> int:
        """Batches left out so far because something was not finite."""
        return self._guard.left_out

    def hear_watch(self) -> None:
        """Add to the notes what was noticed during training since the last time."""
        self.notes += self._watch.news()
        for stage in self._engine.stages.values():
            self.notes += stage.whole.news
            stage.whole.news.clear()

    def _result(self, finished: list[Finished]) -> StepResult:
        self.hear_watch()
        step, left_out = self._engine.batches, self._guard.left_out
        if not finished:
            return StepResult(step, left_out=left_out)
        last = finished[-1]
        return StepResult(step, last.batch, last.loss, last.staleness, left_out)

    def end_epoch(self, metric: float | None = None) -> None:
        """Say that a pass over the data is complete, for learning rates that change once per pass.

        A `Trainer` does this by itself. Each stage goes on to its next learning rate when it has applied the batches
        that were fed so far, so the n-th update has the same one under every method.

        **Arguments:** `metric`: the same on every rank, such as a loss that `evaluate` returned; only a scheduler that
        waits for a plateau looks at it.
        """
        with self._reporting("end_epoch"):
            self._guard.perform(partial(self._engine.end_epoch, metric))

    def flush(self) -> list[StepResult]:
        """Finish all batches under way and return what they brought."""
        with self._reporting("flush"):
            finished = []
            rest = self._compensation.rest()
            if rest is not None:
                finished += self._fed(rest)
            finished += self._guard.drain()
            # A rank that does not flush now would go on with other weights than the rest expects.
            self._world.meet()
            return [self._result([f]) for f in finished]

    def evaluate(
        self, loader: Loader | None, *, metrics: Sequence[Metric] | None = None, path: str | None = None
    ) -> dict[str, float]:
        """Mean loss and metrics at the newest weights; batches under way are not disturbed.

        **Arguments:**

        - `metrics`: functions `(output, target) -> dict of sums`, see `unlatch.metrics`, alike on every rank; else
          those of `parallelize`, or accuracy where outputs are class scores `(N, C)` and targets class numbers `(N,)`.
        - `path`: another way through the network than the serial one, where a method has one (`"auxiliary"` under
          `auxnet`).
        """
        with self._reporting("evaluate"):
            self._guard.settle()
            self._engine.recorder.pause()
            return self._evaluate(self._engine.route(path), loader, metrics)

    def evaluate_recalibrated(
        self, loader: Loader | None, batches: Loader | None, *, metrics: Sequence[Metric] | None = None
    ) -> dict[str, float]:
        """Evaluate as the run is, and again with statistics of batch norm estimated on these training batches.

        The results of the second evaluation are called `recalibrated_...`; the run keeps its own statistics.
        """
        with self._reporting("evaluate_recalibrated"):
            self._guard.settle()
            self._engine.recorder.pause()
            found = self._evaluate(self._engine.route(), loader, metrics)
            with recalibrating(self._engine.original_stages, self._engine.route()) as estimating:
                if not self._evaluate(estimating, batches, ())["samples"]:
                    raise DataError("there was no batch to estimate the statistics of batch norm on")
                again = self._evaluate(self._engine.route(), loader, metrics)
            return found | {f"recalibrated_{name}": value for name, value in again.items() if name != "samples"}

    def _evaluate(
        self, route: dict[int, Any], loader: Loader | None, metrics: Sequence[Metric] | None
    ) -> dict[str, float]:
        engine = self._engine
        stages = engine.schedule.stages
        devices = engine.devices[:stages]
        if loader is not None and engine.holds_first:
            loader = self._batches_of(loader, "evaluate")
        asked = fitted(checked(metrics) if metrics is not None else self.metrics, self.known_metrics)
        settings: dict[str, Any] = {"loss_fn": self._options.loss_fn, "metrics": asked, "like": engine}
        found = evaluate(route, stages, engine.mail, loader, devices=devices, **settings)
        # A rank without a stage of its own takes no part.
        return found if len(set(devices)) == self._world.size else self._world.broadcast(found)

    # ---------------------------------------------------------------- results

    def module(self) -> nn.Module:
        """The model that was passed in, with the newest weights of every stage under its original names."""
        with self._reporting("module"):
            self._guard.settle()
            own = snapshot.model_state(self._engine.original_stages.values(), self._keeping.names)
            own = self._options.device.on_host(own)
            merged = {name: t for part in self._world.gather(own) for name, t in part.items()}
        with torch.no_grad():
            for name, t in self._model.state_dict(keep_vars=True).items():
                # Stages on another device than the model's are copies of its parts.
                if name in merged and (name not in own or self._options.device.runs_ahead):
                    t.data.copy_(merged[name])
        return self._model

    def __repr__(self) -> str:
        """Method, cut, and how far it is."""
        held = sorted({stage.index for stage in self._engine.stages.values()})
        here = "" if self._world.size == 1 else f", rank {self._world.rank} of {self._world.size} with stages {held}"
        cut = "" if self.plan.split is None else f" cut at {list(self.plan.split)}"
        progress = f"{self.batches} batches fed, {self._engine.under_way} under way"
        count = self._engine.columns.count
        copies = "" if count == 1 else f" in each of {count} replicas"
        return f"<Run {self.method!r}: {self._engine.schedule.stages} stages{cut}{copies}{here}; {progress}>"

    def _repr_html_(self) -> str:
        """For notebooks: the plan, by how many updates each stage is behind, and how far the run is."""
        stages = self._engine.schedule.stages
        delays = ", ".join(f"{delay:g}" for delay in self.method.staleness(stages))
        progress = f"{self.batches} batches fed, {self._engine.under_way} under way; learning rate {self.lr}"
        below = "".join(f"<div>{escape(note)}</div>" for note in (f"delay in updates: {delays}", progress, *self.notes))
        return f"<b>{escape(repr(self.method))}, {stages} stages</b>{self.plan._repr_html_()}{below}"

    @property
    def optimizers(self) -> Mapping[int, Optimizer]:
        """Those of this process, by stage; a stage without trainable parameters has none."""
        return MappingProxyType(
            {s.index: s.updater.optimizer for s in self._own_stages() if s.updater.optimizer is not None}
        )

    def _own_stages(self) -> list[Stage]:
        """The stages of this process, each once: where several replicas are here, all do the same."""
        found: dict[int, Stage] = {}
        for stage in self._engine.stages.values():
            found.setdefault(stage.index, stage)
        return list(found.values())

    @property
    def lr(self) -> float | dict[int, list[float]]:
        """The learning rate: one number if all optimizers of this process agree, else by stage and parameter group."""
        rates = {n: [float(group["lr"]) for group in o.param_groups] for n, o in self.optimizers.items()}
        known = {rate for one in rates.values() for rate in one}
        return known.pop() if len(known) == 1 else rates

    @property
    def schedule(self) -> Schedule:
        """What all stations do, in which order; `events` are its entries at work."""
        return self._engine.schedule

    @property
    def stations(self) -> Mapping[int, Station]:
        """What works in this process, by number: its stages, with whatever the method gave them beside."""
        return MappingProxyType(self._engine.stations)

    def named_parameters(self) -> list[tuple[Stage, dict[str, nn.Parameter]]]:
        """For each stage of this process what it trains, by the names that the whole model has for it."""
        return [
            (stage, {names[key]: p for key, p in stage.module.named_parameters() if key in names and p.requires_grad})
            for stage in self._own_stages()
            for names in [self._keeping.names[stage.index]]
        ]

    @property
    def events(self) -> list[Event]:
        """What the stages of this process did, newest last."""
        return list(self._engine.recorder.events)

    def statistics(self) -> list[StageStatistics]:
        """Staleness, bubble, memory and traffic of every stage, on every rank."""
        with self._reporting("statistics"):
            return gather_statistics(self._engine, self.method, self._world, self._links)

    def method_statistics(self) -> list[Any]:
        """What the method measured about itself, for every stage, on every rank; empty for most methods."""
        with self._reporting("method_statistics"):
            parts = self._world.gather(self._engine.method_statistics())
        return sorted((s for part in parts for s in part), key=_by_stage)

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

        A run that is built alike and takes it over with `restore` goes on bit for bit as this one does. Called on all
        ranks after the same batch.
        """
        with self._reporting("state"), self._world.calls.waiting():
            return self._keeping.under_way()()[1]

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where the run was whose `state` this is; nothing may be under way here."""
        self._keeping.go_on(copied(dict(state)))
        self._guard.forget()
        # Whoever goes on first must not send to one who has yet to empty its boxes.
        with self._reporting("restore"):
            self._world.meet()

    def save(
        self,
        path: str | Path,
        *,
        exact: bool = True,
        progress: Mapping[str, Any] | None = None,
        wait: bool = True,
        landed: Callable[[], None] | None = None,
    ) -> Saving:
        """Write a checkpoint. Called on all ranks after the same batch.

        **Arguments:**

        - `exact`: store the batches under way as well, so that a run that loads it goes on bit for bit. Otherwise the
          pipeline is emptied first. Either kind can be loaded into any number of stages, any method and plain PyTorch.
        - `progress`: plain values that a session wants to find again, those of rank 0; and tensors, from all ranks,
          which must not change any more.
        - `wait`: until it is in place; otherwise it is written while training goes on, unless memory is short.
        - `landed`: called on rank 0 once it is in place.

        **Returns:** the checkpoint on its way; `wait()` on it raises what went wrong.
        """
        # What goes wrong with a checkpoint all ranks know alike: nobody is lost by it, and the caller may go on.
        self.finish_saving()
        with self._reporting("save"):
            if not exact:
                self.flush()
            self._guard.settle()
            self._engine.recorder.pause()
            part, made = self._keeping.exact(progress or {}) if exact else self._keeping.drained(progress or {})
            if self._aside is None:
                self._aside = self._world.aside()
                self._aside.heed(self.failure)
            self._guard.saving(Path(path))
            saving = Saving(Path(path), self._aside, part, made, partial(_in_place, landed, self.batches))
        self._saving = saving
        opened(self)
        if wait or _memory_is_short():
            self.finish_saving()
        return saving

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written, and raise what went wrong with it; told once."""
        saving, self._saving = self._saving, None
        if saving is not None:
            try:
                with self._world.calls.waiting():
                    saving.wait()
            finally:
                if self._world.group is None:
                    # Alone, nothing else has to be closed.
                    ended(self)

    def load(self, path: str | Path, *, optimizer: bool = True) -> dict[str, Any]:
        """Continue from a checkpoint: weights and, unless told otherwise, optimizer, learning rates and counters.

        Batches that were under way go on here if method, cut and optimizer are the same; the random numbers of this
        process then continue as well. Otherwise a run like the one that wrote the checkpoint finishes them first.

        **Returns:** what the checkpoint says of the run that wrote it, with the `progress` of its session: tensors that
        end in the name of a parameter where that parameter is, others on every rank.
        """
        self.finish_saving()
        with self._reporting("load"):
            self.flush()
            found = self._keeping.take_over(Path(path), optimizer)
        if isinstance(found, Exception):
            raise found
        self._guard.forget()
        return found

    # ------------------------------------------------------------------- end

    def request_stop(self, number: int) -> None:
        """Ask the session of this run, on all ranks, to end in good order, because signal `number` came.

        **Arguments:** `number`: 0 if it is the session's own wish.
        """
        if self._health is not None:
            self._health.ask_to_stop(number)
        self._asked = number

    def stop_requested(self) -> int | None:
        """The signal for which some rank was asked to end, if any was; others know it within a second or so."""
        if self._asked is not None or self._health is None:
            return self._asked
        return self._health.asked_to_stop()

    def failure(self) -> UnlatchError | None:
        """Why this rank cannot go on, if it cannot."""
        return self._engine.mail.failure()

    def close(self) -> None:
        """Finish what is being saved and take leave of the other ranks.

        Called by the context manager, and at the end of the program where nobody else does.
        """
        try:
            self.finish_saving()
        finally:
            self._leave()

    def end(self, error: BaseException | None = None) -> None:
        """Close at the end of the program; after an error the others are told of it first."""
        if error is not None:
            self._say_why(error)
            self._leave()
            if isinstance(error, PeerLost):
                # Launchers take the first process that ends for the cause.
                time.sleep(_ECHO)
            return
        try:
            self.close()
        except (OSError, UnlatchError) as problem:
            log.error("the last checkpoint could not be written: %s", problem)

    def _leave(self) -> None:
        ended(self)
        # Signs of life are given, and others watched, until all links are closed.
        for link in self._links:
            link.close()
        self._links = []
        self._guard.close()
        if self._aside is not None:
            self._aside.close()
        self._world.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # A session that was interrupted has ended on all ranks alike.
        if kind is None or issubclass(kind, Interrupted):
            self.close()
        elif error is not None:
            self._say_why(error)

    @contextmanager
    def _reporting(self, call: str) -> Iterator[None]:
        """Around a method that is called on every rank: before an error leaves this one, tell the others what it was.

        **Arguments:** `call`: the name of the method.
        """
        try:
            with self._world.calls.of(call):
                try:
                    yield
                except Voided:
                    # The others stop; it found this rank where nothing can be done again.
                    why = self._guard.alarm() or StageFailed("all ranks went back while this one was evaluating")
                    raise why from None
                except TransportError as error:
                    # A message that nobody expects may come from a rank that does something else.
                    raise (self._health.out_of_step() if self._health is not None else None) or error from None
        except BaseException as error:
            self._say_why(error)
            raise

    def _say_why(self, error: BaseException) -> None:
        if self._health is not None:
            self._health.leave_note(_first_line(error))


def _memory_is_short() -> bool:
    """Whether training on would be a risk while a copy of its state is still being written."""
    return psutil.virtual_memory().available < psutil.Process().memory_info().rss


def _in_place(landed: Callable[[], None] | None, batches: int) -> None:
    if landed is not None:
        landed()
    report_progress(batches)


def _by_stage(measured: Any) -> int:
    return int(measured.stage)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
