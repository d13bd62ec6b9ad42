"""One rank's part in a training run with a folder: train, measure, write down, leave a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..callbacks import Callback, Checkpointing, GradientProbing, Live, Progress, RunFolder
from ..data.loader import Loader
from ..errors import ConfigError, Interrupted
from ..io.checkpoints import Checkpoints
from ..io.run_folder import checkpoints_in
from ..train import Run, Trainer
from ..transport.memory import keep_freed_memory
from ..transport.restarts import restarts
from ..transport.signals import heeding_signals
from .console import people
from .prepare import PreparedRun, loaders, make_run
from .ranks import all_ranks
from .stopping import stop_file

__all__ = ["SessionOptions", "train_session"]


@dataclass(frozen=True)
class SessionOptions:
    """What a session writes and shows.

    **Arguments:**

    - `folder`: of the run; exists.
    - `resume`: the checkpoint to continue from.
    - `save_every`: as `Trainer` takes it; there is one at the end in any case.
    - `keep_last`, `keep_best`: so many checkpoints stay, as `Checkpoints` takes it.
    - `people_on_stderr`: whether stdout belongs to a machine.
    - `silent`: show nothing.
    - `probe_every`: updates between comparisons of the gradients with backpropagation; 0 for none.
    - `recalibrate`: training batches on which statistics of batch norm are estimated for a second evaluation at the
      end; 0 for none.
    - `live`: whether somebody follows the run: then what they should know from the start, else `None`.
    """

    folder: str
    resume: str | None = None
    save_every: str | None = None
    keep_last: int = 2
    keep_best: int = 0
    people_on_stderr: bool = False
    silent: bool = False
    probe_every: int = 0
    recalibrate: int = 0
    live: tuple[str, ...] | None = None


def train_session(
    prepared: PreparedRun, options: SessionOptions, data: tuple[Loader, Loader] | None = None
) -> dict[str, Any]:
    """Train what was prepared. Called alike on every rank; the first one reads the data and writes the folder.

    **Returns:** the summary that is also written to `summary.json`, on every rank.
    """
    torch.set_num_threads(prepared.config.run.threads)
    keep_freed_memory()
    with all_ranks() as world:
        reads = world.rank == 0 or prepared.method.reads_on_every_rank
        train, test = (data or loaders(prepared.config)) if reads else (None, None)
        # Some methods build networks that fit the data, and every rank must build the same.
        sample = world.broadcast(train.batch(0, 0) if train is not None else None)
        own = prepared.method.probing(options.probe_every) if options.probe_every else None
        probes = options.probe_every > 0 and own is None
        # Heeded around all of it: a request that comes twice may come again when training is over.
        with make_run(prepared, sample, method=own or prepared.method) as run, heeding_signals(run.request_stop):
            return _train(prepared, options, run, (train, test), probes)


def _train(
    prepared: PreparedRun, options: SessionOptions, run: Run, data: tuple[Loader | None, Loader | None], probes: bool
) -> dict[str, Any]:
    config = prepared.config
    facts: dict[str, Any] = {"model": config.model.name, "data": config.data.name}
    facts |= {"batch_size": config.data.batch_size, "seed": config.run.seed}
    folder = RunFolder(options.folder, made=True, facts=facts)
    callbacks: list[Callback] = [Checkpointing(_checkpoints(options), options.save_every), folder]
    if probes:
        callbacks.append(GradientProbing(options.probe_every))
    if options.live is not None:
        callbacks.append(Live(options.folder, options.live))
    if not options.silent:
        callbacks.append(Progress(people(options.people_on_stderr)))
    trainer = Trainer(run, callbacks=callbacks)
    _resume(trainer, options, config.run.epochs)
    train, test = data
    # A signal, or the file, ends it with a checkpoint, and the summary says so.
    with suppress(Interrupted):
        trainer.fit(
            train,
            until=config.run.epochs,
            eval_loader=test,
            stop=stop_file(options.folder).exists,
            recalibrate=options.recalibrate,
        )
    return folder.summary


def _checkpoints(options: SessionOptions) -> Checkpoints:
    folder = checkpoints_in(options.folder)
    # What an earlier session has marked as the best is not for this one to delete.
    best = options.keep_best or int(Checkpoints(folder).best() is not None)
    return Checkpoints(folder, options.keep_last, best)


def _resume(trainer: Trainer, options: SessionOptions, epochs: int) -> None:
    """Go on from a checkpoint, if there is one to go on from."""
    # Started anew, the ranks may find a newer one than they were sent to.
    if (restarts() > 0 and trainer.resume("latest")) or options.resume is None:
        return
    trainer.resume(options.resume)
    if trainer.epochs >= epochs:
        raise ConfigError(
            f"{options.folder} has been trained for {trainer.epochs} epochs already: raise --epochs to go on"
        )
    if trainer.rank == 0 and trainer.checkpoints is not None:
        # An older one may have been asked for, and whoever is started anew must find that.
        trainer.checkpoints.go_back(trainer.run.batches)
