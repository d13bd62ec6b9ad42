"""A training session: passes over the data, stopping, and where it stands. The machine that it drives is a `Run`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DataError, UnlatchError
from ..nn.tree import batch_size
from ..runtime.engine import Finished
from .run import Loader, Run, StepResult

__all__ = ["Epoch", "Trainer"]


@dataclass(frozen=True)
class Epoch:
    """One pass over the data: mean training loss, samples per second while training, evaluation results."""

    epoch: int
    loss: float
    samples: int
    samples_per_second: float
    evaluation: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Trains a run for some epochs. The same on every rank.

    >>> import torch, unlatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> run = unlatch.parallelize(model, "dtr", stages=2, loss_fn=torch.nn.functional.cross_entropy, split=["1"],
    ...                           optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(3)]
    >>> [epoch.samples for epoch in Trainer(run).fit(batches, epochs=2)]
    [8, 40]
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        #: Passes over the data that are complete.
        self.epochs = 0
        #: Samples fed in the pass that `stop` cut short; 0 between passes.
        self.samples_into_epoch = 0

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
            with self.run._reporting():
                done = self._one_epoch(loader, last, on_step or _ignore, stop or _never)
            if done is None:
                return history
            found = self.run.evaluate(eval_loader) if self._evaluates(eval_loader) else {}
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
        total, start, engine = _Pass(), time.perf_counter(), self.run._engine
        for finished in self._fed(loader, stop, total):
            total.add(finished)
            on_step(self.run._result(finished))
        # Only the leader has seen why the data ended.
        total.stopped, self.samples_into_epoch = self.run._world.broadcast((total.stopped, self.samples_into_epoch))
        if total.outlived and not total.stopped:
            raise DataError(
                f"the loader of stage {engine.lowest} goes on after {engine.batches} batches, where that of stage 0 "
                'ended: with data="build" every rank needs a loader of the same batches'
            )
        if last or total.stopped:
            total.add(engine.drain())
            self.run.hear_watch()
        total.seconds = time.perf_counter() - start
        return None if total.stopped else total

    def _fed(self, loader: Loader | None, stop: Callable[[], bool], total: _Pass) -> Iterator[list[Finished]]:
        """The leader feeds its loader's batches; the others follow until it announces the end."""
        engine, collect = self.run._engine, self.run._compensation
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
        return self.run._world.broadcast(loader is not None)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of the run that also says how far the session is."""
        self.run.save(path, {"epochs": self.epochs, "samples_into_epoch": self.samples_into_epoch})

    def load(self, path: str | Path) -> None:
        """Continue a session from its checkpoint. To go to its place in the data is the caller's part."""
        progress = self.run.load(path)
        self.epochs = int(progress.get("epochs", 0))
        self.samples_into_epoch = int(progress.get("samples_into_epoch", 0))


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


def _ignore(_: object) -> None:
    pass


def _never() -> bool:
    return False
