"""Numbers over the course of training, into files and TensorBoard; and learning rates as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..io import metrics
from ..io.metrics import Metrics
from ..lookup import import_extra
from ..train import Callback, Epoch, StepResult, Trainer

__all__ = ["LearningRates", "MetricsFiles", "TensorBoard"]


class MetricsFiles(Callback):
    """Writes all numbers to `metrics.jsonl`, one object per line, and `metrics.csv`, one number per row.

    A run that continues from a checkpoint writes anew what came after it.

    **Arguments:** `folder`: for the files; written by rank 0.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        #: What the files had when training began.
        self.earlier: list[dict[str, Any]] = []
        self._files: Metrics | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Open the files, and go back in them to where training is."""
        if trainer.rank == 0:
            self.earlier = metrics.rewind(self.folder, trainer.run.batches, trainer.epochs)
            self._files = Metrics(self.folder)

    def on_log(self, trainer: Trainer, step: int, numbers: Mapping[str, float]) -> None:
        """Write a line."""
        if self._files is not None:
            self._files.log(step, numbers)

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Close the files."""
        if self._files is not None:
            self._files.close()
            self._files = None


class TensorBoard(Callback):
    """Writes all numbers as scalars for TensorBoard, which is an extra: `pip install "unlatch[tensorboard]"`.

    A run that continues from a checkpoint hides what came after it.

    **Arguments:** `folder`: for its event files; written by rank 0.
    """

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        import_extra("tensorboard", "tensorboard", "callbacks.TensorBoard")
        self._make = import_module("torch.utils.tensorboard").SummaryWriter
        self.folder = Path(folder)
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin a file."""
        if trainer.rank == 0:
            self._writer = self._make(str(self.folder), purge_step=trainer.run.batches + 1)

    def on_log(self, trainer: Trainer, step: int, numbers: Mapping[str, float]) -> None:
        """Write scalars."""
        if self._writer is not None:
            for name, value in numbers.items():
                self._writer.add_scalar(name, float(value), step)

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class LearningRates(Callback):
    """Logs the learning rate of each group of each stage: with every batch those of rank 0, after an epoch all.

    `stage0/lr` is that of the first group, `stage0/lr1` that of the second. They are what optimizer and scheduler say;
    a method's own factors come on top.
    """

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Those that are here."""
        trainer.log(_rates(trainer))

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """Those of all stages."""
        trainer.log({name: rate for part in trainer.gather(_rates(trainer)) for name, rate in part.items()})


def _rates(trainer: Trainer) -> dict[str, float]:
    return {
        f"stage{stage.index}/lr{number or ''}": float(group["lr"])
        for stage, _ in trainer.run.named_parameters()
        if stage.updater.optimizer is not None
        for number, group in enumerate(stage.updater.optimizer.param_groups)
    }
