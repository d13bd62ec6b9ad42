"""One rank's part in a training run with a folder: train, measure, write down, leave a checkpoint."""

from __future__ import annotations

import json
import statistics as stats
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from ..data.loader import Loader
from ..errors import ConfigError
from ..io import checkpoint
from ..io.metrics import Metrics, read
from ..io.optional import optional_file
from ..report.measures import measures_figure, measures_of
from ..report.probe import probe_figure, read_probe, reconstruction_figure
from ..runtime.events import Event, bubble
from ..train import Epoch, Run, StageStatistics, StepResult, Trainer
from ..train.probe import Comparison, as_metrics
from .console import people
from .prepare import PreparedRun, loaders, make_run
from .progress import Display, Silent, display_for
from .ranks import agree, gather, rank
from .stopping import stop_file

__all__ = ["SessionOptions", "train_session"]


@dataclass(frozen=True)
class SessionOptions:
    """What a session writes and shows.

    **Arguments:**

    - `folder`: of the run; exists.
    - `resume`: continue from the checkpoint in it.
    - `save_every`: epochs between checkpoints; 0 for one at the end only. Each empties the pipeline.
    - `people_on_stderr`: whether stdout belongs to a machine.
    - `silent`: show nothing.
    - `probe_every`: updates between comparisons of the gradients with backpropagation; 0 for none.
    - `recalibrate`: training batches on which statistics of batch norm are estimated for a second evaluation at the
      end; 0 for none.
    """

    folder: str
    resume: bool = False
    save_every: int = 0
    people_on_stderr: bool = False
    silent: bool = False
    probe_every: int = 0
    recalibrate: int = 0

    @property
    def last(self) -> Path:
        """The newest checkpoint."""
        return Path(self.folder) / "last"


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
    leads = rank() == 0
    train, test = (data or loaders(prepared.config)) if leads or prepared.method.reads_on_every_rank else (None, None)
    metrics = Metrics(options.folder) if leads else None
    try:
        # Some methods build networks that fit the data, and every rank must build the same.
        sample = agree(train.batch(0, 0) if train is not None else None)
        own = prepared.method.probing(options.probe_every) if options.probe_every else None
        with make_run(prepared, sample, method=own or prepared.method) as run:
            session = _Session(prepared, options, run, metrics, probes=options.probe_every > 0 and own is None)
            return session.train(train, test)
    finally:
        if metrics is not None:
            metrics.close()


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

    @property
    def per_batch(self) -> float:
        """Mean seconds per batch."""
        return self._seconds / max(1, self._batches)


class _Session:
    def __init__(
        self, prepared: PreparedRun, options: SessionOptions, run: Run, metrics: Metrics | None, probes: bool
    ) -> None:
        self.prepared, self.options, self.run, self.metrics = prepared, options, run, metrics
        self.trainer = Trainer(run)
        self.epochs: list[Epoch] = []
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
        if self.options.resume:
            self._resume(train)
        if self._probes:
            self.run.probe_gradients(every=self.options.probe_every, on_found=self._on_probe)
        left = self.prepared.config.run.epochs - self.trainer.epochs
        self.display = self._display()
        self._since = time.perf_counter()
        asked = stop_file(self.options.folder).exists
        try:
            self._source = _TimedLoader(train) if train is not None else None
            done = self.trainer.fit(
                self._source, left, test, on_step=self._on_step, on_epoch=self._on_epoch, stop=asked
            )
        finally:
            self.display.close()
        self.trainer.save(self.options.last)
        finished = len(done) == left
        if finished and self.options.recalibrate:
            self._recalibrate(train, test)
        return self._close("finished" if finished else "interrupted", time.perf_counter() - start)

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

    def _resume(self, train: Loader | None) -> None:
        """Weights, optimizer, counters, and the place in the data after the last batch that was fed."""
        self.trainer.load(self.options.last)
        if self.trainer.epochs >= self.prepared.config.run.epochs:
            raise ConfigError(
                f"{self.options.folder} has been trained for {self.trainer.epochs} epochs already: raise --epochs to "
                "go on"
            )
        self._step = int(checkpoint.state(self.options.last)["loop"]["batches"])
        if (problem := agree(self._enter_epoch(train) if train is not None else None)) is not None:
            raise ConfigError(problem)

    def _enter_epoch(self, train: Loader) -> str | None:
        """Go to the first batch that was not fed. **Returns:** what is wrong if there is no such place."""
        samples = self.trainer.samples_into_epoch
        batch, surplus = divmod(samples, train.batch_size)
        if surplus or batch >= len(train):
            return (
                f"{self.options.folder} was stopped after {samples} samples of epoch {self.trainer.epochs + 1}, and "
                f"no batch of {train.batch_size} begins there: continue it with the batch size and data it had"
            )
        train.load_state_dict(train.state_dict() | {"epoch": self.trainer.epochs, "batch": batch})
        return None

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
            self.metrics.log(self._step, self._numbers(epoch))
        if self.options.save_every and (epoch.epoch + 1) % self.options.save_every == 0:
            self.trainer.save(self.options.last)
        self._since = time.perf_counter()

    def _measure(self) -> None:
        """Staleness and memory so far; bubble of this epoch alone, since evaluation is not idleness."""
        found = self.found = self.run.statistics()
        mine = [e for e in self.run.events if e.start >= self._since]
        idle = gather(bubble(mine, {e.stage for e in mine}))
        self.bubbles.append(idle)
        self.stages = [{**_as_row(stage), "bubble": idle[stage.rank]} for stage in found]
        self._log_measurements()
        self.special = {name: value for part in self.statistics for name, value in part.metrics().items()}

    def _log_measurements(self) -> None:
        """What the method measured of itself since the last call."""
        self.statistics = self.run.method_statistics()
        for numbers in self.prepared.method.measurements(self.statistics, after=self._measured):
            self._measured = int(numbers["measured/update"])
            if self.metrics is not None:
                self.metrics.log(self._step, numbers)

    def _numbers(self, epoch: Epoch) -> dict[str, float]:
        numbers: dict[str, float] = {
            "epoch/number": epoch.epoch + 1,
            "train/epoch_loss": epoch.loss,
            "train/samples_per_second": epoch.samples_per_second,
            **{f"eval/{name}": value for name, value in epoch.evaluation.items()},
        }
        for stage in self.stages:
            numbers |= {f"stage{stage['stage']}/{name}": stage[name] for name in _MEASURED if stage[name] is not None}
        return numbers | self.special

    # -------------------------------------------------------------------- end

    def _close(self, status: str, seconds: float) -> dict[str, Any]:
        events = sorted((e for part in gather(self.run.events) for e in part), key=lambda e: e.start)
        self._log_measurements()
        summary = self._summary(status, seconds)
        self._log_probes()
        if self.metrics is not None:
            folder = Path(self.options.folder)
            _write_events(folder / "events.jsonl", events)
            if self._probes:
                _draw(folder / "probe.png", probe_figure(read_probe(folder)))
            self._draw_reconstruction(folder)
            if measures := measures_of(read(folder)):
                _draw(folder / "measures.png", measures_figure({"": measures}))
            with optional_file(folder / "summary.json") as draft:
                draft.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        return summary

    def _draw_reconstruction(self, folder: Path) -> None:
        if any(stage.reconstruction for stage in self.found):
            figure = reconstruction_figure(self.found, per_update=self.prepared.method.per_update)
            _draw(folder / "reconstruction.png", figure)

    def _summary(self, status: str, seconds: float) -> dict[str, Any]:
        config, last = self.prepared.config, self.epochs[-1] if self.epochs else None
        evaluation = last.evaluation if last is not None else {}
        # The first epoch fills the pipeline and warms caches; it counts only if it is all there is.
        steady = self.epochs[1:] or self.epochs
        bubbles = self.bubbles[1:] or self.bubbles
        per_rank = [stats.median(column) for column in zip(*bubbles, strict=True)]
        speed = stats.median(e.samples_per_second for e in steady) if steady else None
        data = self._source.per_batch if self._source is not None else 0.0
        return {
            "status": status,
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
            "notes": list(dict.fromkeys(note for notes in gather(self.run.notes) for note in notes)),
            **self.recalibrated,
            "measures": dict(self.prepared.method.measures),
            "remarks": [],
            **self.prepared.method.summarise(self.statistics, data, config.data.batch_size / speed if speed else None),
        }


def _as_row(stage: StageStatistics) -> dict[str, Any]:
    """Its numbers by name; the list of all measurements is drawn."""
    return {name: value for name, value in asdict(stage).items() if isinstance(value, int | float | None)}


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
