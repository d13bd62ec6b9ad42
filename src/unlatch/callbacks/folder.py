"""The folder of a run: everything about it that is worth keeping, as `unlatch compare` reads it."""

from __future__ import annotations

import json
import math
import statistics as stats
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import Interrupted
from ..io import metrics, run_folder
from ..io.optional import optional_file
from ..runtime.events import Event, costs_of_kinds
from ..train import Epoch, Trainer
from ..transport.restarts import restarts
from .logs import MetricsFiles

__all__ = ["RunFolder"]

_UPDATE, _PROBE = "measured/update", "probe/update"


class RunFolder(MetricsFiles):
    """Writes metrics, what the stages did when, figures and a summary to a folder that `unlatch compare` reads.

    **Arguments:**

    - `folder`: new or empty; that of an earlier run if training continues from a checkpoint.
    - `facts`: what the summary says beside what a run knows: `model`, `data`, `batch_size`, `seed`.
    - `overwrite`: an earlier run in the folder is deleted.
    - `made`: whether somebody else makes, describes and locks the folder.

    After `fit`, `summary` is what `summary.json` has, on every rank.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        facts: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        made: bool = False,
    ) -> None:
        super().__init__(folder)
        self.facts, self.overwrite, self.made = dict(facts or {}), overwrite, made
        self.summary: dict[str, Any] = {}
        self._held: run_folder.RunFolder | None = None
        self._bubbles: list[Sequence[float]] = []
        self._epochs: list[Epoch] = []
        self._special: tuple[Any, ...] = ()
        self._newest = -1
        self._begun = time.perf_counter()

    def on_start(self, trainer: Trainer) -> None:
        """Make the folder and go back in it to where training is."""
        self._begun, self._bubbles, self._epochs = time.perf_counter(), [], []
        if trainer.rank == 0 and not self.made:
            self._held = self._opened(trainer)
            self._held.describe(None)
        super().on_start(trainer)
        self._newest = max((int(row[_UPDATE]) for row in self.earlier if _UPDATE in row), default=-1)

    def _opened(self, trainer: Trainer) -> run_folder.RunFolder:
        # Ranks that were started anew may have lost a run without a checkpoint: it is theirs all the same.
        if run_folder.is_run(self.folder) and (trainer.run.batches or restarts()):
            return run_folder.RunFolder.resume(self.folder)
        return run_folder.RunFolder.at(self.folder, overwrite=self.overwrite)

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """Log what the method measured of itself since the last time."""
        assert trainer.measured is not None
        self._epochs.append(epoch)
        self._bubbles.append(trainer.measured.bubbles)
        self._log_measurements(trainer, trainer.measured.special)

    def _log_measurements(self, trainer: Trainer, special: Sequence[Any]) -> None:
        self._special = tuple(special)
        for numbers in trainer.run.method.measurements(list(special), after=self._newest):
            self._newest = int(numbers[_UPDATE])
            trainer.log(numbers)

    # -------------------------------------------------------------------- end

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write the summary if all ranks have come to the end; close the files in any case."""
        try:
            if error is None or isinstance(error, Interrupted):
                self._sum_up(trainer, error)
        finally:
            super().on_end(trainer, error)
            if self._held is not None:
                self._held.release()
                self._held = None

    def _sum_up(self, trainer: Trainer, error: Interrupted | None) -> None:
        events = sorted((e for part in trainer.gather(trainer.run.events) for e in part), key=lambda e: e.start)
        self._log_measurements(trainer, trainer.run.method_statistics())
        self.summary = {**self._summary(trainer, error), "kinds": costs_of_kinds(events)}
        if trainer.rank != 0:
            return
        _write_events(self.folder / "events.jsonl", events)
        self._draw_figures(trainer)
        with optional_file(self.folder / "summary.json") as draft:
            draft.write_text(json.dumps(self.summary, indent=1) + "\n", encoding="utf-8")

    def _draw_figures(self, trainer: Trainer) -> None:
        # Whoever has nothing to draw does not wait for a plotting library.
        from ..report.measures import measures_figure, measures_of

        rows = metrics.read(self.folder)
        stages = list(trainer.measured.stages) if trainer.measured is not None else []
        figures = {}
        if any(_PROBE in row for row in rows):
            from ..report.probe import probe_figure, read_probe

            figures["probe"] = probe_figure(read_probe(self.folder))
        if any(stage.reconstruction for stage in stages):
            from ..report.probe import reconstruction_figure

            figures["reconstruction"] = reconstruction_figure(stages, per_update=trainer.run.method.per_update)
        if measures := measures_of(rows):
            figures["measures"] = measures_figure({"": measures})
        for name, figure in figures.items():
            with optional_file(self.folder / f"{name}.png") as draft:
                figure.savefig(draft, dpi=140)

    def _summary(self, trainer: Trainer, error: Interrupted | None) -> dict[str, Any]:
        run, method = trainer.run, trainer.run.method
        earlier = [_epoch_in(row) for row in self.earlier if "epoch/number" in row][-1:]
        epochs = self._epochs or earlier
        last = epochs[-1] if epochs else None
        evaluation = last.evaluation if last is not None else {}
        # The first epoch fills the pipeline and warms caches; it counts only if it is all there is.
        steady, bubbles = epochs[1:] or epochs, self._bubbles[1:] or self._bubbles
        per_rank = [stats.median(column) for column in zip(*bubbles, strict=True)]
        speed = stats.median(e.samples_per_second for e in steady) if steady else None
        rows = trainer.measured.rows() if trainer.measured is not None else []
        size = self.facts.get("batch_size", trainer.batch_size)
        own = {"model": type(run._model).__name__, "data": None, "batch_size": size, "seed": None}
        return {
            "status": "interrupted" if error is not None or trainer.cut_short else "finished",
            "signal": error.number if error is not None else None,
            "restarts": restarts(),
            "method": method.name,
            "method_in_full": repr(method),
            **own,
            **self.facts,
            "processes": trainer.ranks,
            "split": run.plan.split,
            "microbatches": method.microbatches,
            "epochs": trainer.epochs,
            "steps": run.batches,
            "accuracy": evaluation.get("accuracy"),
            "eval_loss": evaluation.get("loss"),
            "evaluation": {name: value for name, value in evaluation.items() if math.isfinite(value)},
            "train_loss": last.loss if last is not None else None,
            "samples_per_second": speed,
            "bubble": stats.mean(per_rank) if per_rank else None,
            "seconds": time.perf_counter() - self._begun,
            "stages": [{**row, "bubble": per_rank[row["rank"]]} for row in rows if per_rank],
            "notes": list(dict.fromkeys(note for notes in trainer.gather(run.notes) for note in notes)),
            **trainer.recalibrated,
            "measures": dict(method.measures),
            "remarks": [],
            **method.summarise(list(self._special), trainer.data_seconds, size / speed if speed and size else None),
        }


def _epoch_in(row: Mapping[str, Any]) -> Epoch:
    """The epoch whose end a line of metrics is about."""
    evaluation = {name.removeprefix("eval/"): value for name, value in row.items() if name.startswith("eval/")}
    named = ("epoch/number", "train/epoch_loss", "train/samples_per_second")
    number, loss, speed = (row.get(name, math.nan) for name in named)
    return Epoch(int(number) - 1, loss, 0, speed, evaluation)


def _write_events(path: Path, events: Sequence[Event]) -> None:
    """One line per action; times in seconds since the first one."""
    origin = events[0].start if events else 0.0
    with optional_file(path) as draft, draft.open("w", encoding="utf-8") as file:
        for event in events:
            shifted = event._replace(start=round(event.start - origin, 7), end=round(event.end - origin, 7))
            file.write(json.dumps(shifted._asdict()) + "\n")
