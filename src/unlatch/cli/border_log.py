"""What a method with auxiliary variables adds to a run folder: its borders, its networks, its speed-up formula."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..api import Run
from ..data.loader import Loader
from ..errors import ConfigError
from ..io.metrics import read
from ..methods import Method
from ..methods.auxnet import BorderMethod
from ..methods.local import Local
from ..methods.local.statistics import LocalStatistics, layer_parallel_times
from ..report.borders import border_figure, border_metrics, borders_of

__all__ = ["BorderLog", "TimedLoader", "builds_data", "with_own_probe"]


def builds_data(method: Method) -> bool:
    """Whether every rank reads the data for itself."""
    return isinstance(method, BorderMethod) and method.data == "build"


def with_own_probe(method: Method, every: int) -> Method | None:
    """The method with its own comparison with backpropagation switched on; `None` for methods that have none.

    >>> from unlatch.methods import AuxNet
    >>> with_own_probe(AuxNet(), 5).probe
    5
    """
    if not isinstance(method, Local):
        return None
    if not isinstance(method, BorderMethod):
        raise ConfigError(
            f"--probe compares with backpropagation, and {method.name} has no border to measure at: leave it out"
        )
    return replace(method, probe=every)


class TimedLoader:
    """A loader that knows how long its batches took.

    **Arguments:** `loader`: of one rank.
    """

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
        """As the loader's own."""
        self.loader.set_epoch(epoch)

    @property
    def per_batch(self) -> float:
        """Mean seconds per batch."""
        return self._seconds / max(1, self._batches)


class BorderLog:
    """Collects what is measured at borders; does nothing for other methods. Called alike on every rank.

    **Arguments:** `run`: whose borders.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._active = isinstance(run.method, BorderMethod)
        self._measured: list[LocalStatistics] = []
        self._update = -1

    def news(self) -> list[dict[str, float]]:
        """Rows for the metrics: what was measured since the last call."""
        if not self._active:
            return []
        self._measured = self._run.method_statistics()
        rows = border_metrics(self._measured, after=self._update)
        self._update = int(rows[-1]["border/update"]) if rows else self._update
        return rows

    def summary(self, data: float, step: float | None) -> dict[str, Any]:
        """For the run's summary: the size of every AuxNet, and the speed-up formula with the measured terms.

        **Arguments:** `data`: seconds per batch to read it; `step`: measured seconds per batch of this run.
        """
        if not self._active or len(self._measured) < 2:
            return {}
        sizes = [(part.stage, part.capacity) for part in self._measured if part.capacity is not None]
        times = layer_parallel_times(self._measured, data)
        stages = len(self._measured)
        return {
            "auxnets": [
                {
                    "stage": stage,
                    **asdict(size),
                    "parameter_ratio": size.parameter_ratio,
                    "flop_ratio": size.flop_ratio,
                }
                for stage, size in sizes
            ],
            "layer_parallel": {
                **times.summary(stages),
                "measured_step_seconds": step,
                "text": times.text(stages),
            },
        }

    def draw(self, folder: Path) -> None:
        """Write `borders.png`, if anything was measured in this run or before it was resumed."""
        borders = borders_of(read(folder)) if self._active else {}
        if borders:
            border_figure({"": borders}).savefig(folder / "borders.png", dpi=140)
