"""Progress of training: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..train import Epoch, StepResult

__all__ = ["Bar", "Display", "Lines", "Silent", "display_for"]

#: Seconds between two lines inside a long epoch.
_QUIET = 20.0


class Display(Protocol):
    """Is told what happens."""

    def step(self, result: StepResult) -> None:
        """One batch was fed."""

    def epoch(self, epoch: Epoch, staleness: float) -> None:
        """One epoch ended; `staleness` is that of the stalest stage."""

    def close(self) -> None:
        """Training is over."""


class Silent:
    """Says nothing: what ranks other than the first show."""

    def step(self, result: StepResult) -> None:
        """Nothing."""

    def epoch(self, epoch: Epoch, staleness: float) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Pace:
    """Samples per second over the last batches, and the smoothed loss."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._times: deque[float] = deque(maxlen=50)
        self.loss: float | None = None
        self.stale = 0

    def add(self, result: StepResult) -> None:
        self._times.append(time.perf_counter())
        if result.loss is not None:
            self.loss = result.loss if self.loss is None else 0.9 * self.loss + 0.1 * result.loss
        self.stale = max(result.staleness.values(), default=0)

    @property
    def rate(self) -> float:
        span = self._times[-1] - self._times[0] if len(self._times) > 1 else 0.0
        return self._batch_size * (len(self._times) - 1) / span if span > 0 else 0.0

    def __str__(self) -> str:
        loss = "filling" if self.loss is None else f"loss {self.loss:.4f}"
        return f"{loss}  {self.rate:,.0f} samples/s  staleness {self.stale}"


def _epoch_line(epoch: Epoch, epochs: int, staleness: float) -> str:
    accuracy = epoch.evaluation.get("accuracy")
    judged = f"  accuracy {accuracy:.4f}" if accuracy is not None else ""
    return (
        f"epoch {epoch.epoch + 1}/{epochs}  loss {epoch.loss:.4f}{judged}  {epoch.samples_per_second:,.0f} samples/s  "
        f"staleness {staleness:.2g}"
    )


class Lines:
    """One line per epoch, and one now and then inside a long epoch."""

    def __init__(self, console: Console, epochs: int, batches: int, batch_size: int) -> None:
        self._console, self._epochs, self._batches = console, epochs, batches
        self._pace = _Pace(batch_size)
        self._last = time.monotonic()

    def step(self, result: StepResult) -> None:
        """A line if the last one is long ago."""
        self._pace.add(result)
        if time.monotonic() - self._last > _QUIET:
            self._say(f"batch {result.step}/{self._epochs * self._batches}  {self._pace}")

    def epoch(self, epoch: Epoch, staleness: float) -> None:
        """A line."""
        self._say(_epoch_line(epoch, self._epochs, staleness))

    def close(self) -> None:
        """Nothing to put away."""

    def _say(self, text: str) -> None:
        self._console.print(text)
        self._console.file.flush()
        self._last = time.monotonic()


class Bar:
    """A bar that moves, with a line above it for every finished epoch."""

    def __init__(self, console: Console, epochs: int, batches: int, batch_size: int) -> None:
        self._epochs, self._pace = epochs, _Pace(batch_size)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._task: TaskID = self._bar.add_task("", total=epochs * batches)
        self._bar.start()

    def step(self, result: StepResult) -> None:
        """Move the bar."""
        self._pace.add(result)
        self._bar.update(self._task, completed=result.step, description=str(self._pace))

    def epoch(self, epoch: Epoch, staleness: float) -> None:
        """A line above the bar."""
        self._bar.console.print(_epoch_line(epoch, self._epochs, staleness))

    def close(self) -> None:
        """Leave the terminal in order."""
        self._bar.stop()


def display_for(console: Console, epochs: int, batches: int, batch_size: int) -> Display:
    """A bar if `console` is a terminal that can show one, else lines."""
    kind = Bar if console.is_terminal and not console.is_dumb_terminal else Lines
    return kind(console, epochs, batches, batch_size)
