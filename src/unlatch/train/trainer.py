"""A training session: passes over the data, stopping, checkpoints, and where it stands. It drives a `Run`."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ..errors import CallbackFailed, ConfigError, DataError, Interrupted, OutOfStep, PeerLost, UnlatchError
from ..io.checkpoints import Checkpoints
from ..metrics import Metric, checked
from ..nn.tree import batch_size, copied
from ..runtime.engine import Finished, Order
from ..transport.signals import heeding_signals
from .callback import Callback, Callbacks
from .epoch import Epoch, Monitor, Pass, results_by_path
from .exact import random_state, restore_random
from .measured import Measured, measure
from .run import Loader, Run, StepResult
from .snapshot import tolerating

__all__ = ["Every", "Trainer"]

log = logging.getLogger("unlatch")

T = TypeVar("T")


@dataclass(frozen=True)
class Every:
    """How often something happens, as `"50 batches"`, `"5 minutes"` or `"1 epochs"` say it.

    >>> Every.parse("50 batches")
    Every(count=50.0, unit='batches')
    """

    count: float
    unit: str

    @classmethod
    def parse(cls, text: str | Every) -> Every:
        """The same from words."""
        if isinstance(text, Every):
            return text
        match = re.fullmatch(r"\s*([0-9.]+)\s*(batch|minute|epoch)(?:e?s)?\s*", str(text))
        count = float(match[1]) if match and match[1].count(".") < 2 and match[1] != "." else 0.0
        if match is None or count <= 0 or (match[2] != "minute" and count != int(count)):
            raise ConfigError(f'expected "50 batches", "5 minutes" or "1 epochs", got {text!r}')
        return cls(count, {"batch": "batches", "minute": "minutes", "epoch": "epochs"}[match[2]])


class Trainer:
    """Trains a run for some epochs. The same on every rank.

    **Arguments:**

    - `run`: what is trained.
    - `checkpoints`: a folder for them, or a `Checkpoints` that says how many are kept. With one, SIGTERM and Ctrl-C end
      `fit` with a checkpoint, and `resume` continues from the latest.
    - `save_every`: `"50 batches"`, `"5 minutes"` or `"1 epochs"` between checkpoints, which are written while training
      goes on; none by default. After the last epoch there is none: call `save()`.
    - `callbacks`: are told what happens, in this order; see `unlatch.callbacks`.
    - `metrics`: what evaluations measure beside the loss, see `unlatch.metrics`; by default what the run does.
    - `monitor`: the result of an evaluation by which checkpoints are the best, as `"accuracy"` or a `Monitor`;
      schedulers that wait for a plateau watch it too. By default they watch the loss.

    >>> import torch, unlatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> run = unlatch.parallelize(model, "dtr", stages=2, loss_fn=torch.nn.functional.cross_entropy, split=["1"],
    ...                           optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
    >>> [epoch.samples for epoch in Trainer(run).fit(batches, epochs=2)]
    [8, 40]
    """

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints | str | Path | None = None,
        save_every: Every | str | None = None,
        *,
        callbacks: Iterable[Callback] = (),
        metrics: Sequence[Metric] | None = None,
        monitor: str | Monitor | None = None,
    ) -> None:
        self.run = run
        self.checkpoints = Checkpoints(checkpoints) if isinstance(checkpoints, str | Path) else checkpoints
        self.save_every = Every.parse(save_every) if save_every is not None else None
        self.metrics = checked(metrics) if metrics is not None else None
        self.monitor = monitor if isinstance(monitor, Monitor) else Monitor(monitor)
        #: Passes over the data that are complete, and at how many `fit` ends.
        self.epochs = self.until = 0
        #: Samples and batches fed in the pass that is under way or was cut short; 0 between passes.
        self.samples_into_epoch = self.batches_into_epoch = 0
        #: Batches that the loader has per epoch, where it says so; known where it is read.
        self.batches_per_epoch: int | None = None
        #: Samples of the largest batch that has finished.
        self.batch_size: int | None = None
        #: The epochs that the last `fit` completed.
        self.history: list[Epoch] = []
        #: Why the last `fit` ended before it was to, as `stop` was told; and whether that was inside of a pass.
        self.stopped: str | None = None
        self.cut_short = False
        #: What the stages measured up to the end of the last pass; only if there are callbacks.
        self.measured: Measured | None = None
        #: Results of the last evaluation with batch norm estimated anew.
        self.recalibrated: dict[str, float] = {}
        self._total = Pass()
        # Random numbers at the beginning of the pass, which a loader shuffles by, and those that a resumed run goes on
        # with.
        self._begin: dict[str, Any] | None = None
        self._goes_on: dict[str, Any] | None = None
        # Why the last pass was cut short: the number of a signal, 0 for `stop`.
        self._ended: int | None = None
        self._saved_at = time.monotonic()
        self._unannounced: Path | None = None
        self._eval_loader: Loader | None = None
        self._waited, self._waits, self._at_start = 0.0, 0, 0
        self._callbacks = Callbacks(self, callbacks)
        self._callbacks.attach()
        if self.save_every is not None and self.checkpoints is None:
            raise ConfigError("save_every needs a folder: pass checkpoints= too")

    @property
    def callbacks(self) -> list[Callback]:
        """In the order in which they are told."""
        return list(self._callbacks.listed)

    @property
    def rank(self) -> int:
        """Of this process; 0 is the one that reads the data, writes files and speaks."""
        return self.run._world.rank

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return self.run._world.size

    @property
    def data_seconds(self) -> float:
        """Mean seconds that the loader took for a batch in the last `fit`; known where it is read."""
        return self._waited / max(1, self._waits)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank. For callbacks, where all ranks are at the same place."""
        with self.run._reporting("gather"):
            return self.run._world.gather(value)

    def stop(self, why: str = "stop was called") -> None:
        """Ask `fit` to end in good order. For callbacks.

        Asked in `on_epoch` on any rank, this epoch is the last one on all. Asked in `on_step` on all ranks, or on the
        one that reads the data, no further batch is fed; on another one alone, the pass under way is the last.
        """
        self.stopped = why

    def log(self, numbers: Mapping[str, float]) -> None:
        """Hand numbers to the callbacks that write them down."""
        self._callbacks.tell("on_log", self.run.batches, dict(numbers))

    def fit(
        self,
        loader: Loader | None,
        epochs: int = 1,
        eval_loader: Loader | None = None,
        *,
        until: int | None = None,
        stop: Callable[[], bool] | None = None,
        recalibrate: int = 0,
    ) -> list[Epoch]:
        """Train for some epochs; the pipeline stays filled between them and is emptied at the end.

        After a stop or `resume` the first pass goes on where it was: a loader with `seek(epoch, samples)` goes there,
        any other is iterated from its start, with the random numbers that it had, and what was fed is left out.

        **Arguments:**

        - `loader`: yields `(x, y)`; iterated once per epoch on the leading rank only, after `set_epoch` if it has it.
        - `epochs`: so many more, a pass that was cut short counting as one.
        - `eval_loader`: evaluated after every epoch, at the newest weights.
        - `until`: instead of `epochs`: until so many passes are complete, those before `resume` included.
        - `stop`: asked on the leading rank before every batch, but not inside of batches that are processed as one.
          Once it says yes, nothing further is fed. The pass under way is then neither evaluated nor counted;
          `samples_into_epoch` says how far it came. What is under way stays so, and the next `fit` goes on from there.
        - `recalibrate`: evaluate once more at the end, with statistics of batch norm estimated anew on so many training
          batches; the results are in `recalibrated`.

        **Returns:** the epochs that were completed: fewer than asked for if `stop` or a callback said so.

        **Raises:** with a checkpoint written, if there is a folder for them: `Interrupted` after a signal; `NonFinite`
        where a loss, gradient or weight is NaN or infinite, and then the checkpoint is from before that;
        `CallbackFailed` after a callback has raised, on any rank.
        """
        heeding = heeding_signals(self.run.request_stop) if self.checkpoints is not None else nullcontext()
        left = epochs if until is None else until - self.epochs
        self.until = self.epochs + left
        self.history, self.stopped, self.cut_short, self.recalibrated = [], None, False, {}
        self._callbacks.begin()
        self._waited, self._waits, self._at_start = 0.0, 0, self.run.batches
        self._eval_loader = eval_loader
        self.batches_per_epoch = _length(loader)
        with self.run._reporting("fit"):
            evaluates = self.run._world.broadcast(eval_loader is not None)
        if self.checkpoints is not None:
            self.run._guard.place, self.run._guard.progress = self._place, self._progress
        with heeding, self._telling_of_the_end():
            for last in (n == left - 1 for n in range(left)):
                if not self._one_epoch(loader, last, evaluates, stop or _never):
                    break
            self._settle()
            if self._ended:
                self.save()
                number, self._ended = self._ended, None
                raise Interrupted(number)
            if recalibrate and evaluates and self.epochs >= self.until:
                self._recalibrate(loader, recalibrate)
        return self.history

    def evaluate(self, loader: Loader | None = None) -> dict[str, float]:
        """Evaluate with the metrics of this session: what `fit` was given as `eval_loader`, or something else."""
        return self.run.evaluate(loader if loader is not None else self._eval_loader, metrics=self.metrics)

    def _recalibrate(self, loader: Loader | None, batches: int) -> None:
        """Evaluate once more, with statistics of batch norm that the network itself would have had."""
        numbers, fresh = random_state(), None
        if self.run._engine.leads and loader is not None:
            _go_to(loader, self.epochs)
            fresh = list(islice(self.run._batches_of(loader, "fit"), batches))
        restore_random(numbers)
        found = self.run.evaluate_recalibrated(self._eval_loader, fresh, metrics=self.metrics)
        self.recalibrated = {name: value for name, value in found.items() if name.startswith("recalibrated_")}
        self.log(results_by_path(self.recalibrated))

    # --------------------------------------------------------------- callbacks

    @contextmanager
    def _telling_of_the_end(self) -> Iterator[None]:
        """Tell the callbacks of the beginning and, however it comes, of the end."""
        try:
            self._tell_together("on_start")
            yield
            self._tell_together("on_end", None)
        except BaseException as error:
            self._callbacks.abandon(error)
            raise

    def _tell_together(self, hook: str, *happened: Any) -> None:
        """Call a hook in which ranks may exchange values: one that raises must not leave others waiting for it."""
        if self._callbacks.listed:
            self._agree()
        for callback in self._callbacks.listed:
            self._callbacks.tell_one(callback, hook, *happened)
            self._agree()

    def _agree(self) -> None:
        """All ranks alike: raise what a callback has raised on any of them; a wish to stop is a wish of all."""
        failure = self._callbacks.failure
        with self.run._reporting("fit"):
            try:
                told = self.run._world.gather((None if failure is None else str(failure), self.stopped))
            except OutOfStep as error:
                # Others still exchange values in the callback that has raised here: it is the cause.
                raise failure or error from (failure.__cause__ if failure is not None else None)
            failed = {rank: text for rank, (text, _) in enumerate(told) if text is not None}
            if failed:
                outcome = self._saved_after_all()
                if failure is not None:
                    raise CallbackFailed(f"{failure}.{outcome}") from failure.__cause__
                rank, text = next(iter(failed.items()))
                raise PeerLost(f"rank {rank} stopped: {text}.{outcome}")
        self.stopped = next((why for _, why in told if why is not None), None)

    def _saved_after_all(self) -> str:
        """Where the state is when a callback ends a session that is sound itself."""
        if self.checkpoints is None or self.run.batches == self._at_start:
            return ""
        try:
            self._settle()
            self._save(None, exact=True, wait=True)
        except (OSError, UnlatchError) as error:
            return f" The state could not be saved: {error}"
        return f" The state is saved in {self.checkpoints.path(self.run.batches)}."

    # ---------------------------------------------------------------- one pass

    def _one_epoch(self, loader: Loader | None, last: bool, evaluates: bool, stop: Callable[[], bool]) -> bool:
        """A pass and all that belongs to its end. **Returns:** whether there may be another one."""
        begun = time.perf_counter()
        with self.run._reporting("fit"):
            self._one_pass(loader, last, stop)
        self.cut_short = self._ended is not None
        self._agree()
        if self.cut_short:
            return False
        found = self.evaluate() if evaluates else {}
        if evaluates:
            self._tell_together("on_evaluation", found)
        watched = found.get(self.monitor.name or "loss", found.get("loss", self._total.mean_loss))
        self.run.end_epoch(watched)
        epoch = self._closed(found)
        self.history.append(epoch)
        if self._callbacks.listed:
            self.measured = measure(self.run, begun)
            self.log({**epoch.numbers(), **self.measured.numbers()})
            self._tell_together("on_epoch", epoch)
        if not last:
            self._save_by_epoch(epoch)
        return self.stopped is None

    def _closed(self, evaluation: dict[str, float]) -> Epoch:
        """Count a pass that is complete."""
        epoch = Epoch(self.epochs, self._total.mean_loss, self._total.samples, self._total.speed, evaluation)
        self.epochs, self.samples_into_epoch, self.batches_into_epoch = self.epochs + 1, 0, 0
        self._total, self._begin = Pass(), None
        return epoch

    def _one_pass(self, loader: Loader | None, last: bool, stop: Callable[[], bool]) -> None:
        total, start, engine = self._total, time.perf_counter(), self.run._engine
        outlived, self._ended = False, None
        self.run._guard.keep()
        for finished in self._fed(loader, stop):
            if finished is Order.END:
                outlived = engine.leads
                break
            assert isinstance(finished, list)
            total.add(finished)
            for batch in finished:
                self.batch_size = max(self.batch_size or 0, batch.samples // self.run.method.joined)
            self._report(self.run._result(finished))
        # Only the leader has seen why the data ended.
        shared = (self._ended, self.samples_into_epoch, self.batches_into_epoch)
        self._ended, self.samples_into_epoch, self.batches_into_epoch = self.run._world.broadcast(shared)
        if outlived and self._ended is None:
            raise DataError(
                f"the loader of stage {engine.lowest} goes on after {engine.batches} batches, where that of stage 0 "
                'ended: with data="build" every rank needs a loader of the same batches'
            )
        if last and self._ended is None:
            total.add(self.run._guard.drain())
            self.run.hear_watch()
        total.seconds += time.perf_counter() - start

    def _report(self, result: StepResult) -> None:
        if result.loss is not None:
            self.log({"train/loss": result.loss})
        self._callbacks.tell("on_step", result)

    def _fed(self, loader: Loader | None, stop: Callable[[], bool]) -> Iterator[list[Finished] | Order]:
        """The leader feeds its loader's batches; the others follow until it announces the end."""
        engine, collect = self.run._engine, self.run._compensation
        if not engine.leads:
            yield from self._followed()
            return
        if loader is None:
            raise UnlatchError("fit needs a loader on the rank that holds stage 0")
        for batch in self._until_asked(loader, stop):
            self.samples_into_epoch += batch_size(batch[0])
            self.batches_into_epoch += 1
            unit = collect.add(*batch)
            if unit is not None:
                finished = self._step(*unit)
                yield finished
                if finished is Order.END:
                    return
                self._after_batch()
        if self.batches_into_epoch == 0 and self._ended is None:
            raise DataError("the loader gave no batch: is it an iterator that was used up, or the data set empty?")
        rest = collect.rest()
        if rest is not None:
            yield self._step(*rest)
            self._after_batch()
        self.run._guard.announce(Order.END)

    def _until_asked(self, loader: Loader, stop: Callable[[], bool]) -> Iterator[Any]:
        """The batches of the pass up to where it is cut short; checkpoints by the clock are written between them."""
        engine, collect = self.run._engine, self.run._compensation
        batches: Iterator[Any] | None = None
        while True:
            # Asked before the loader is: what it draws from random numbers belongs to the batch that follows.
            if engine.holds_first and collect.is_empty:
                self._ended = self._asked_to_end(stop)
                if self._ended is not None:
                    return
                if self._minutes_are_up():
                    self.run._guard.announce(Order.SAVE)
                    self._save_beside()
            if batches is None:
                batches = self._placed(loader)
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._waited, self._waits = self._waited + time.perf_counter() - start, self._waits + 1
            yield batch

    def _followed(self) -> Iterator[list[Finished] | Order]:
        while (finished := self._step()) is not Order.END:
            yield finished
            self._after_batch()

    def _step(self, *unit: Any) -> list[Finished] | Order:
        """One batch, after the checkpoints that the leader wants before it."""
        while (finished := self.run._guard.feed(*unit)) is Order.SAVE:
            self._save_beside()
        return finished

    def _asked_to_end(self, stop: Callable[[], bool]) -> int | None:
        """The signal to end for; 0 if the caller or a callback wants it; `None` to go on."""
        number = self.run.stop_requested()
        if number == 0 or self._callbacks.failure is not None or self.stopped is not None:
            return 0
        if number is not None and self.checkpoints is not None:
            return number
        return 0 if stop() else None

    def _placed(self, loader: Loader) -> Iterator[Any]:
        """The batches of the pass that were not fed yet."""
        _go_to(loader, self.epochs)
        goes_on, self._goes_on = self._goes_on or random_state(), None
        skipped, seek = self.batches_into_epoch, getattr(loader, "seek", None)
        if not skipped or seek is not None:
            restore_random(goes_on)
            self._begin = self._begin or goes_on
            if skipped and seek is not None:
                seek(self.epochs, self.samples_into_epoch)
            return self.run._batches_of(loader, "fit")
        if self._begin is not None:
            restore_random(self._begin)
        batches = self.run._batches_of(loader, "fit")
        for number in range(skipped):
            if next(batches, None) is None:
                raise DataError(
                    f"the checkpoint was written after {skipped} batches of epoch {self.epochs + 1}, and the loader "
                    f"has only {number}: continue with the batch size and data of the run that wrote it"
                )
        restore_random(goes_on)
        return batches

    # ------------------------------------------------------------- checkpoints

    def save(self, path: str | Path | None = None, *, exact: bool = True, score: float | None = None) -> None:
        """Write a checkpoint of the run that also says how far the session is: to `path`, or as the latest one.

        **Arguments:** `exact`: as for `Run.save`; `score`: higher is better, for those who keep the best.
        """
        self._save(path, exact, wait=True, score=score)

    def _save(self, path: str | Path | None, exact: bool, wait: bool, score: float | None = None) -> None:
        landed = None
        if path is None:
            path, landed = self._place(self.run._engine.batches, score)
        self._saved_at = time.monotonic()
        self.run.finish_saving()
        self._announce_checkpoint()
        self.run.save(path, exact=exact, progress=self._progress(), wait=wait, landed=landed)
        self._unannounced = Path(path)
        if wait:
            self._announce_checkpoint()

    def _announce_checkpoint(self) -> None:
        path, self._unannounced = self._unannounced, None
        if path is not None:
            self._callbacks.tell("on_checkpoint", path)

    def _progress(self) -> dict[str, Any]:
        """What `load` goes on from."""
        return {
            "epochs": self.epochs,
            "samples_into_epoch": self.samples_into_epoch,
            "batches_into_epoch": self.batches_into_epoch,
            "summed": [self._total.samples, self._total.loss, self._total.weight],
            "epoch_random": self._begin,
            **copied(self._callbacks.state()),
        }

    def _place(self, step: int, score: float | None = None) -> tuple[Path, Callable[[], None]]:
        """Where the checkpoint of a step goes, and what makes it the latest one."""
        if self.checkpoints is None:
            raise ConfigError("save needs a place: a path, or Trainer(run, checkpoints=...)")
        return self.checkpoints.path(step), partial(self.checkpoints.landed, step, score)

    def _save_beside(self, score: float | None = None) -> None:
        """Write a checkpoint while training goes on."""
        self._settle()
        self._save(None, exact=True, wait=False, score=score)

    def _settle(self) -> None:
        """Wait for a checkpoint under way. One that fails is no reason to stop training: the one before stays."""
        try:
            self.run.finish_saving()
            self._announce_checkpoint()
        except (OSError, UnlatchError) as error:
            self._unannounced = None
            if self.run.failure() is not None:
                raise
            if self.run._world.rank == 0:
                log.warning("a checkpoint could not be written: %s. Training goes on; the one before stays.", error)

    def score(self, epoch: Epoch) -> float:
        """How good the model is after an epoch by what is monitored, higher is better."""
        try:
            return self.monitor.score(epoch)
        except ConfigError as error:
            raise ConfigError(f"{error}.{self._saved_after_all()}") from None

    def _save_by_epoch(self, epoch: Epoch) -> None:
        every = self.save_every
        if every is not None and every.unit == "epochs" and self.epochs % every.count == 0:
            self._save_beside(self.score(epoch))

    def _after_batch(self) -> None:
        """Keep the state, or write it, if it is time for that."""
        self.run._guard.keep()
        every = self.save_every
        if every is not None and every.unit == "batches" and self.run._guard.position % every.count == 0:
            self._save_beside()

    def _minutes_are_up(self) -> bool:
        every = self.save_every
        minutes = every.count if every is not None and every.unit == "minutes" else math.inf
        return time.monotonic() - self._saved_at >= 60 * minutes

    def load(self, path: str | Path) -> None:
        """Continue a session from a checkpoint; `fit` then goes to its place in the data."""
        found = self.run.load(path)
        self._goes_on = random_state()
        with tolerating(Path(path)):
            progress = _Progress.model_validate({name: found[name] for name in _Progress.model_fields if name in found})
            if progress.epoch_random is not None:
                restore_random(progress.epoch_random)
                restore_random(self._goes_on)
        self.epochs = progress.epochs
        self.samples_into_epoch, self.batches_into_epoch = progress.samples_into_epoch, progress.batches_into_epoch
        self._total = Pass(int(progress.summed[0]), *progress.summed[1:])
        self._begin = progress.epoch_random
        self._callbacks.load(found)

    def resume(self, source: str | Path = "latest") -> bool:
        """Continue from the latest checkpoint of the folder, or from another one.

        **Returns:** `False` if there is none yet, so that a script can call this at every start.
        """
        found: Path | None = Path(source)
        if source == "latest":
            if self.checkpoints is None:
                raise ConfigError('resume("latest") needs a folder: Trainer(run, checkpoints=...)')
            # Where hosts share no disk, only the rank that writes can know.
            with self.run._reporting("resume"):
                found = self.run._world.broadcast(self.checkpoints.latest())
        if found is None:
            return False
        self.load(found)
        return True


class _Progress(BaseModel):
    """What a checkpoint says of the session that wrote it.

    **Arguments:** `summed`: samples, losses and their weight, of the pass under way; `epoch_random`: random numbers at
    its beginning.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    epochs: int = Field(0, ge=0)
    samples_into_epoch: int = Field(0, ge=0)
    batches_into_epoch: int = Field(0, ge=0)
    summed: Annotated[list[float], Field(min_length=2, max_length=3)] = [0, 0.0]
    epoch_random: dict[str, Any] | None = None


def _never() -> bool:
    return False


def _length(loader: Loader | None) -> int | None:
    """Batches of a loader, if it knows."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _go_to(loader: Loader, epoch: int) -> None:
    set_epoch = getattr(loader, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
