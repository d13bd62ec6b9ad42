"""Progress of training: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ..train import Callback, Epoch, StepResult, Trainer

__all__ = ["Progress", "steps_of"]

#: Seconds between two lines inside a long epoch.
_QUIET = 20.0


class _Pace:
    """Samples per second over the last batches, and the smoothed loss."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=50)
        self._samples = 0
        self.loss: float | None = None
        self.stale = 0

    def add(self, result: StepResult, samples: int) -> None:
        self._times.append(time.perf_counter())
        self._samples = samples
        if result.loss is not None:
            self.loss = result.loss if self.loss is None else 0.9 * self.loss + 0.1 * result.loss
        self.stale = max(result.staleness.values(), default=0)

    @property
    def rate(self) -> float:
        span = self._times[-1] - self._times[0] if len(self._times) > 1 else 0.0
        return self._samples * (len(self._times) - 1) / span if span > 0 else 0.0

    def __str__(self) -> str:
        loss = "filling" if self.loss is None else f"loss {self.loss:.4f}"
        return f"{loss}  {self.rate:,.0f} samples/s  staleness {self.stale}"


class Progress(Callback):
    """Shows how training goes: one line per epoch and, on a terminal, a bar that moves. Rank 0 speaks.

    **Arguments:** `console`: where to; stdout by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        # Never wraps or re-styles what it is given; honours NO_COLOR.
        self._console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._pace = _Pace()
        self._said = time.monotonic()

    def on_start(self, trainer: Trainer) -> None:
        """Begin a bar where one can be shown."""
        self._pace, self._said = _Pace(), time.monotonic()
        if trainer.rank == 0 and _can_move(self._console):
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=steps_of(trainer))
            self._bar.start()

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Move the bar, or say a line if the last one is long ago."""
        self._pace.add(result, (trainer.batch_size or 0) * trainer.run.method.joined)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=result.step, description=str(self._pace))
        elif time.monotonic() - self._said > _QUIET:
            steps = steps_of(trainer)
            self._say(trainer, f"batch {result.step}{'' if steps is None else f'/{steps}'}  {self._pace}")

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """A line, above the bar if there is one."""
        measured = trainer.measured.stages if trainer.measured is not None else ()
        stale = max((stage.staleness for stage in measured), default=0.0)
        results = "".join(f"  {name} {value:.4f}" for name, value in _judged(epoch).items())
        self._say(
            trainer,
            f"epoch {epoch.epoch + 1}/{trainer.until}  loss {epoch.loss:.4f}{results}  "
            f"{epoch.samples_per_second:,.0f} samples/s  staleness {stale:.2g}",
        )

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the terminal in order."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
        if error is None and trainer.stopped is not None:
            self._say(trainer, f"stopped: {trainer.stopped}")

    def _say(self, trainer: Trainer, text: str) -> None:
        if trainer.rank == 0:
            self._console.print(text)
            self._console.file.flush()
        self._said = time.monotonic()


def _can_move(console: Console) -> bool:
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal


def steps_of(trainer: Trainer) -> int | None:
    """Steps of the whole training, if the loader knows its length: several batches may be joined to one."""
    batches = trainer.batches_per_epoch
    return None if batches is None else trainer.until * math.ceil(batches / trainer.run.method.joined)


def _judged(epoch: Epoch) -> dict[str, float]:
    """What an evaluation found, without what a line has room for no longer."""
    return {name: value for name, value in epoch.evaluation.items() if name not in ("loss", "samples")}
