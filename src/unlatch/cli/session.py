"""One rank's part in a training run with a folder: train, measure, write down, leave a checkpoint."""

from __future__ import annotations

import json
import math
import statistics as stats
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ..data.loader import Loader
from ..errors import ConfigError, Interrupted
from ..io import metrics
from ..io.checkpoints import Checkpoints
from ..io.metrics import Metrics
from ..io.optional import optional_file
from ..io.run_folder import checkpoints_in
from ..report.measures import measures_figure, measures_of
from ..report.probe import probe_figure, read_probe, reconstruction_figure
from ..runtime.events import Event, bubble
from ..train import Epoch, Run, StageStatistics, StepResult, Trainer
from ..train.probe import Comparison, as_metrics
from ..transport.restarts import restarts
from ..transport.signals import heeding_signals
from ..transport.world import World
from .console import people
from .prepare import PreparedRun, loaders, make_run
from .progress import Display, Silent, display_for
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


_OF_EPOCHS = ("epoch/number", "train/epoch_loss", "train/samples_per_second")
_UPDATE = "measured/update"
_MEASURED = (
    "staleness",
    "predicted_staleness",
    "delay",
    "bubble",
    "in_flight",
    "peak_bytes",
    "stored_bytes",
    "message_bytes",
    "weight_copies",
    "updates",
    "bytes_sent",
    "reconstruction_error",
)


def train_session(
    prepared: PreparedRun, options: SessionOptions, data: tuple[Loader, Loader] | None = None
) -> dict[str, Any]:
    """Train what was prepared. Called alike on every rank; the first one reads the data and writes the folder.

    **Returns:** the summary that is also written to `summary.json`, on every rank.
    """
    torch.set_num_threads(prepared.config.run.threads)
    with all_ranks() as world:
        reads = world.rank == 0 or prepared.method.reads_on_every_rank
        train, test = (data or loaders(prepared.config)) if reads else (None, None)
        # Some methods build networks that fit the data, and every rank must build the same.
        sample = world.broadcast(train.batch(0, 0) if train is not None else None)
        own = prepared.method.probing(options.probe_every) if options.probe_every else None
        with make_run(prepared, sample, method=own or prepared.method) as run:
            session = _Session(prepared, options, run, world, probes=options.probe_every > 0 and own is None)
            try:
                # Around all of it: a request that comes twice may come again when training is over.
                with heeding_signals(run.request_stop):
                    return session.train(train, test)
            finally:
                session.close()


class _TimedLoader:
    """A loader that knows how long its batches took."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self._seconds = 0.0
        self._batches = 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        batches = iter(self.loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self._seconds += time.perf_counter() - start
            self._batches += 1
            yield batch

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def seek(self, epoch: int, samples: int) -> None:
        self.loader.seek(epoch, samples)

    @property
    def per_batch(self) -> float:
        """Mean seconds per batch."""
        return self._seconds / max(1, self._batches)


class _Session:
    def __init__(self, prepared: PreparedRun, options: SessionOptions, run: Run, world: World, probes: bool) -> None:
        self.prepared, self.options, self.run, self.world = prepared, options, run, world
        folder = checkpoints_in(options.folder)
        # What an earlier session has marked as the best is not for this one to delete.
        best = options.keep_best or int(Checkpoints(folder).best() is not None)
        self.checkpoints = Checkpoints(folder, options.keep_last, best)
        self.trainer = Trainer(run, self.checkpoints, options.save_every)
        self.metrics: Metrics | None = None
        # Of this session, and the last one before it.
        self.epochs: list[Epoch] = []
        self._before: list[Epoch] = []
        self.bubbles: list[list[float]] = []
        self.stages: list[dict[str, Any]] = []
        self.found: list[StageStatistics] = []
        self.special: dict[str, float] = {}
        self.probed: list[dict[str, float]] = []
        self._probes = probes
        self.statistics: list[Any] = []
        self._measured = -1
        self.recalibrated: dict[str, float] = {}
        self._source: _TimedLoader | None = None
        self._since = time.perf_counter()
        self._step = 0

    def train(self, train: Loader | None, test: Loader | None) -> dict[str, Any]:
        start = time.perf_counter()
        self._resume()
        if self.world.rank == 0:
            self.metrics = Metrics(self.options.folder)
        if self._probes:
            self.run.probe_gradients(every=self.options.probe_every, on_found=self._on_probe)
        self.display = self._display()
        self._since = time.perf_counter()
        try:
            number = self._fit(train, test)
        finally:
            self.display.close()
        if number is None and self.options.recalibrate:
            self._recalibrate(train, test)
        return self._close(number, time.perf_counter() - start)

    def close(self) -> None:
        """Close the files."""
        if self.metrics is not None:
            self.metrics.close()

    def _fit(self, train: Loader | None, test: Loader | None) -> int | None:
        """Train to the end and leave a checkpoint. **Returns:** why it was cut short: a signal, 0 for the file."""
        self._source = _TimedLoader(train) if train is not None else None
        epochs, asked = self.prepared.config.run.epochs, stop_file(self.options.folder).exists
        try:
            done = self.trainer.fit(
                self._source, until=epochs, eval_loader=test, on_step=self._on_step, on_epoch=self._on_epoch, stop=asked
            )
        except Interrupted as request:
            return request.number
        finished = self.trainer.epochs >= epochs
        self.trainer.save(score=done[-1].score if done and finished else None)
        return None if finished else 0

    def _recalibrate(self, train: Loader | None, test: Loader | None) -> None:
        """Evaluate once more, with statistics of batch norm that the network itself would have had."""
        fresh = None
        if train is not None:
            fresh = [train.batch(self.trainer.epochs, i) for i in range(min(self.options.recalibrate, len(train)))]
        found = self.run.evaluate_recalibrated(test, fresh)
        self.recalibrated = {name: value for name, value in found.items() if name.startswith("recalibrated_")}
        if self.metrics is not None:
            self.metrics.log(self._step, {f"eval/{name}": value for name, value in self.recalibrated.items()})

    def _display(self) -> Display:
        config = self.prepared.config
        if self.metrics is None or self.options.silent:
            return Silent()
        console = people(self.options.people_on_stderr)
        return display_for(
            console, config.run.epochs, self.prepared.steps, config.data.batch_size * self.prepared.method.joined
        )

    # ----------------------------------------------------------------- resume

    def _resume(self) -> None:
        """Go on from a checkpoint, if there is one to go on from, in the metrics as well."""
        trainer, asked = self.trainer, self.options.resume
        # Started anew, the ranks may find a newer one than they were sent to.
        again = restarts() > 0 and trainer.resume("latest")
        if not again and asked is not None:
            trainer.resume(asked)
            if trainer.epochs >= self.prepared.config.run.epochs:
                raise ConfigError(
                    f"{self.options.folder} has been trained for {trainer.epochs} epochs already: raise --epochs to "
                    "go on"
                )
            if self.world.rank == 0:
                # An older one may have been asked for, and whoever is started anew must find that.
                self.checkpoints.go_back(self.run.batches)
        self._step = self.run.batches
        if self.world.rank != 0:
            return
        rows = metrics.rewind(self.options.folder, self._step, trainer.epochs)
        self._measured = max((int(row[_UPDATE]) for row in rows if _UPDATE in row), default=-1)
        self._before = [_epoch_in(row) for row in rows if "epoch/number" in row][-1:]

    # -------------------------------------------------------------- callbacks

    def _on_step(self, result: StepResult) -> None:
        self._step = result.step
        self.display.step(result)
        if self.metrics is not None and result.loss is not None:
            self.metrics.log(result.step, {"train/loss": result.loss})
        self._log_probes()

    def _on_probe(self, found: list[Comparison]) -> None:
        # A probe speaks in the middle of a step; metrics are written at its end.
        self.probed.append({"probe/update": found[0].update, **as_metrics(found)} if found else {})

    def _log_probes(self) -> None:
        for numbers in self.probed if self.metrics is not None else ():
            self.metrics.log(self._step, numbers)  # type: ignore[union-attr]
        self.probed = []

    def _on_epoch(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)
        self._measure()
        self.display.epoch(epoch, max(stage["staleness"] for stage in self.stages))
        if self.metrics is not None:
            # Before all else that belongs to the end of an epoch: what is dropped on resuming begins here.
            self.metrics.log(self._step, self._numbers(epoch))
        self._log_measurements()
        self._since = time.perf_counter()

    def _measure(self) -> None:
        """Staleness and memory so far; bubble of this epoch alone, since evaluation is not idleness."""
        found = self.found = self.run.statistics()
        mine = [e for e in self.run.events if e.start >= self._since]
        idle = self.world.gather(bubble(mine, {e.stage for e in mine}))
        self.bubbles.append(idle)
        self.stages = [{**_as_row(stage), "bubble": idle[stage.rank]} for stage in found]
        self.statistics = self.run.method_statistics()
        self.special = {name: value for part in self.statistics for name, value in part.metrics().items()}

    def _log_measurements(self) -> None:
        """What the method measured of itself since the last time."""
        for numbers in self.prepared.method.measurements(self.statistics, after=self._measured):
            self._measured = int(numbers[_UPDATE])
            if self.metrics is not None:
                self.metrics.log(self._step, numbers)

    def _numbers(self, epoch: Epoch) -> dict[str, float]:
        numbers: dict[str, float] = {
            **dict(zip(_OF_EPOCHS, (epoch.epoch + 1, epoch.loss, epoch.samples_per_second), strict=True)),
            **{f"eval/{name}": value for name, value in epoch.evaluation.items()},
        }
        for stage in self.stages:
            numbers |= {f"stage{stage['stage']}/{name}": stage[name] for name in _MEASURED if stage[name] is not None}
        return numbers | self.special

    # -------------------------------------------------------------------- end

    def _close(self, number: int | None, seconds: float) -> dict[str, Any]:
        events = sorted((e for part in self.world.gather(self.run.events) for e in part), key=lambda e: e.start)
        self.statistics = self.run.method_statistics()
        self._log_measurements()
        summary = self._summary(number, seconds)
        self._log_probes()
        if self.metrics is not None:
            folder = Path(self.options.folder)
            _write_events(folder / "events.jsonl", events)
            if self._probes:
                _draw(folder / "probe.png", probe_figure(read_probe(folder)))
            self._draw_reconstruction(folder)
            if measures := measures_of(metrics.read(folder)):
                _draw(folder / "measures.png", measures_figure({"": measures}))
            with optional_file(folder / "summary.json") as draft:
                draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        return summary

    def _draw_reconstruction(self, folder: Path) -> None:
        if any(stage.reconstruction for stage in self.found):
            figure = reconstruction_figure(self.found, per_update=self.prepared.method.per_update)
            _draw(folder / "reconstruction.png", figure)

    def _summary(self, number: int | None, seconds: float) -> dict[str, Any]:
        config, epochs = self.prepared.config, self.epochs or self._before
        last = epochs[-1] if epochs else None
        evaluation = last.evaluation if last is not None else {}
        # The first epoch fills the pipeline and warms caches; it counts only if it is all there is.
        steady = epochs[1:] or epochs
        bubbles = self.bubbles[1:] or self.bubbles
        per_rank = [stats.median(column) for column in zip(*bubbles, strict=True)]
        speed = stats.median(e.samples_per_second for e in steady) if steady else None
        data = self._source.per_batch if self._source is not None else 0.0
        return {
            "status": "finished" if number is None else "interrupted",
            "signal": number or None,
            "restarts": restarts(),
            "method": config.method.name,
            "method_in_full": repr(self.prepared.method),
            "model": config.model.name,
            "data": config.data.name,
            "processes": config.run.processes,
            "split": self.run.plan.split,
            "microbatches": self.prepared.method.microbatches,
            "batch_size": config.data.batch_size,
            "seed": config.run.seed,
            "epochs": self.trainer.epochs,
            "steps": self._step,
            "accuracy": evaluation.get("accuracy"),
            "eval_loss": evaluation.get("loss"),
            "train_loss": last.loss if last is not None else None,
            "samples_per_second": speed,
            "bubble": stats.mean(per_rank) if per_rank else None,
            "seconds": seconds,
            "stages": [{**stage, "bubble": per_rank[stage["rank"]]} for stage in self.stages],
            "notes": list(dict.fromkeys(note for notes in self.world.gather(self.run.notes) for note in notes)),
            **self.recalibrated,
            "measures": dict(self.prepared.method.measures),
            "remarks": [],
            **self.prepared.method.summarise(self.statistics, data, config.data.batch_size / speed if speed else None),
        }


def _as_row(stage: StageStatistics) -> dict[str, Any]:
    """Its numbers by name; the list of all measurements is drawn."""
    return {name: value for name, value in asdict(stage).items() if isinstance(value, int | float | None)}


def _epoch_in(row: Mapping[str, Any]) -> Epoch:
    """The epoch whose end a line of metrics is about."""
    evaluation = {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}
    number, loss, speed = (row.get(name, math.nan) for name in _OF_EPOCHS)
    return Epoch(int(number) - 1, loss, 0, speed, evaluation)


def _draw(path: Path, figure: Figure) -> None:
    with optional_file(path) as draft:
        figure.savefig(draft, dpi=140)


def _write_events(path: Path, events: Sequence[Event]) -> None:
    """One line per action; times in seconds since the first one."""
    origin = events[0].start if events else 0.0
    with optional_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        for event in events:
            shifted = event._replace(start=round(event.start - origin, 7), end=round(event.end - origin, 7))
            file.write(json.dumps(shifted._asdict()) + "\n")
