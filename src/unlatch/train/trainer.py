"""A training session: passes over the data, stopping, checkpoints, and where it stands. It drives a `Run`."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ..errors import ConfigError, DataError, Interrupted, UnlatchError
from ..io.checkpoints import Checkpoints
from ..nn.tree import batch_size
from ..runtime.engine import Finished, Order
from ..transport.signals import heeding_signals
from .exact import random_state, restore_random
from .run import Loader, Run, StepResult
from .saving import Saving
from .snapshot import tolerating

__all__ = ["Epoch", "Every", "Trainer"]

log = logging.getLogger("unlatch")


@dataclass(frozen=True)
class Epoch:
    """One pass over the data: mean training loss, samples per second while training, evaluation results."""

    epoch: int
    loss: float
    samples: int
    samples_per_second: float
    evaluation: dict[str, float] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """How good the model is after it, higher is better: the accuracy, or minus the loss where there is none."""
        return self.evaluation.get("accuracy", -self.evaluation.get("loss", self.loss))


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
      goes on; none by default.

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
    ) -> None:
        self.run = run
        self.checkpoints = Checkpoints(checkpoints) if isinstance(checkpoints, str | Path) else checkpoints
        self.save_every = Every.parse(save_every) if save_every is not None else None
        if self.save_every is not None and self.checkpoints is None:
            raise ConfigError("save_every needs a folder: pass checkpoints= too")
        #: Passes over the data that are complete.
        self.epochs = 0
        #: Samples and batches fed in the pass that is under way or was cut short; 0 between passes.
        self.samples_into_epoch = self.batches_into_epoch = 0
        self._total = _Pass()
        # Random numbers at the beginning of the pass, which a loader shuffles by, and those that a resumed run goes on
        # with.
        self._begin: dict[str, Any] | None = None
        self._goes_on: dict[str, Any] | None = None
        # Why the last pass was cut short: the number of a signal, 0 for `stop`.
        self._ended: int | None = None
        self._saved_at = time.monotonic()

    def fit(
        self,
        loader: Loader | None,
        epochs: int = 1,
        eval_loader: Loader | None = None,
        *,
        until: int | None = None,
        on_step: Callable[[StepResult], None] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Epoch]:
        """Train for some epochs; the pipeline stays filled between them and is emptied at the end.

        After a stop or `resume` the first pass goes on where it was: a loader with `seek(epoch, samples)` goes there,
        any other is iterated from its start, with the random numbers that it had, and what was fed is left out.

        **Arguments:**

        - `loader`: yields `(x, y)`; iterated once per epoch on the leading rank only, after `set_epoch` if it has it.
        - `epochs`: so many more, a pass that was cut short counting as one.
        - `eval_loader`: evaluated after every epoch, at the newest weights.
        - `until`: instead of `epochs`: until so many passes are complete, those before `resume` included.
        - `on_step`, `on_epoch`: called with each `StepResult` and `Epoch`.
        - `stop`: asked on the leading rank before every batch, but not inside of batches that are processed as one.
          Once it says yes, nothing further is fed. The pass under way is then neither evaluated nor counted;
          `samples_into_epoch` says how far it came. What is under way stays so, and the next `fit` goes on from there.

        **Returns:** the epochs that were completed: fewer than asked for if `stop` said so.

        **Raises:** with a checkpoint written, if there is a folder for them: `Interrupted` after a signal; `NonFinite`
        where a loss, gradient or weight is NaN or infinite, and then the checkpoint is from before that.
        """
        heeding = heeding_signals(self.run.request_stop) if self.checkpoints is not None else nullcontext()
        left = epochs if until is None else until - self.epochs
        history: list[Epoch] = []
        with self.run._reporting("fit"):
            evaluates = self.run._world.broadcast(eval_loader is not None)
        if self.checkpoints is not None:
            self.run._guard.place, self.run._guard.progress = self._place, self._progress
        with heeding:
            for last in (n == left - 1 for n in range(left)):
                with self.run._reporting("fit"):
                    self._one_epoch(loader, last, on_step or _ignore, stop or _never)
                if self._ended is not None:
                    break
                epoch = self._closed(self.run.evaluate(eval_loader) if evaluates else {})
                history.append(epoch)
                if on_epoch is not None:
                    on_epoch(epoch)
                if not last:
                    self._save_by_epoch(epoch)
            self._settle()
            if self._ended:
                self.save()
                number, self._ended = self._ended, None
                raise Interrupted(number)
        return history

    def _closed(self, evaluation: dict[str, float]) -> Epoch:
        """Count a pass that is complete."""
        epoch = Epoch(self.epochs, self._total.mean_loss, self._total.samples, self._total.speed, evaluation)
        self.epochs, self.samples_into_epoch, self.batches_into_epoch = self.epochs + 1, 0, 0
        self._total, self._begin = _Pass(), None
        return epoch

    def _one_epoch(
        self, loader: Loader | None, last: bool, on_step: Callable[[StepResult], None], stop: Callable[[], bool]
    ) -> None:
        total, start, engine = self._total, time.perf_counter(), self.run._engine
        outlived, self._ended = False, None
        self.run._guard.keep()
        for finished in self._fed(loader, stop):
            if finished is Order.END:
                outlived = engine.leads
                break
            assert isinstance(finished, list)
            total.add(finished)
            on_step(self.run._result(finished))
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
            try:
                batch = next(batches)
            except StopIteration:
                return
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
        """The signal to end for; 0 if the caller wants it; `None` to go on."""
        number = self.run.stop_requested() if self.checkpoints is not None else None
        return number if number is not None else (0 if stop() else None)

    def _placed(self, loader: Loader) -> Iterator[Any]:
        """The batches of the pass that were not fed yet."""
        set_epoch = getattr(loader, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epochs)
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

    def _save(self, path: str | Path | None, exact: bool, wait: bool, score: float | None = None) -> Saving:
        landed = None
        if path is None:
            path, landed = self._place(self.run._engine.batches, score)
        self._saved_at = time.monotonic()
        return self.run.save(path, exact=exact, progress=self._progress(), wait=wait, landed=landed)

    def _progress(self) -> dict[str, Any]:
        """What `load` goes on from."""
        return {
            "epochs": self.epochs,
            "samples_into_epoch": self.samples_into_epoch,
            "batches_into_epoch": self.batches_into_epoch,
            "summed": [self._total.samples, self._total.loss],
            "epoch_random": self._begin,
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
        except (OSError, UnlatchError) as error:
            if self.run.failure() is not None:
                raise
            if self.run._world.rank == 0:
                log.warning("a checkpoint could not be written: %s. Training goes on; the one before stays.", error)

    def _save_by_epoch(self, epoch: Epoch) -> None:
        every = self.save_every
        if every is not None and every.unit == "epochs" and self.epochs % every.count == 0:
            self._save_beside(epoch.score)

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
        self._total = _Pass(int(progress.summed[0]), progress.summed[1])
        self._begin = progress.epoch_random

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

    **Arguments:** `summed`: samples and losses of the pass under way; `epoch_random`: random numbers at its beginning.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    epochs: int = Field(0, ge=0)
    samples_into_epoch: int = Field(0, ge=0)
    batches_into_epoch: int = Field(0, ge=0)
    summed: Annotated[list[float], Field(min_length=2, max_length=2)] = [0, 0.0]
    epoch_random: dict[str, Any] | None = None


class _Pass:
    """Sums over the batches that finished in one pass over the data, with those before a resume."""

    def __init__(self, samples: int = 0, loss: float = 0.0) -> None:
        self.samples, self.loss = samples, loss
        self.seconds = 0.0
        self._before = samples

    def add(self, finished: Iterable[Finished]) -> None:
        for batch in finished:
            self.samples += batch.samples
            self.loss += batch.loss * batch.samples

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.samples)

    @property
    def speed(self) -> float:
        """Samples per second, as far as they were timed."""
        return (self.samples - self._before) / max(self.seconds, 1e-9)


def _ignore(_: object) -> None:
    pass


def _never() -> bool:
    return False
