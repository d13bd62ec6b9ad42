"""The best and the last checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..io.checkpoints import Checkpoints
from ..train import Callback, Every, Monitor, Trainer

__all__ = ["Checkpointing"]


class Checkpointing(Callback):
    """Keeps the last few and the best checkpoints in a folder, and leaves one at the end.

    It sets what `Trainer` takes as `checkpoints`, `save_every` and `monitor`: signals then end `fit` with a checkpoint,
    and `trainer.resume()` finds the latest.

    **Arguments:**

    - `folder`: for the checkpoints, or a `unlatch.Checkpoints`, which says itself how many are kept.
    - `every`: as `save_every`; `None` saves only at the end.
    - `keep_last`, `keep_best`: so many stay.
    - `monitor`, `mode`: the result by which they are the best, see `unlatch.train.Monitor`.

    >>> import tempfile, torch, unlatch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> run = unlatch.parallelize(model, "bp", stages=2, loss_fn=torch.nn.functional.cross_entropy, split=["1"],
    ...                           optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    >>> batches = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = unlatch.Trainer(run, callbacks=[Checkpointing(folder, keep_last=2, keep_best=1, monitor="loss")])
    ...     _ = trainer.fit(batches, epochs=4, eval_loader=batches)
    ...     trainer.checkpoints.latest().name, trainer.checkpoints.best().name
    ('step-00000004', 'step-00000004')
    """

    def __init__(
        self,
        folder: str | Path | Checkpoints,
        every: Every | str | None = "1 epochs",
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        self.checkpoints = folder if isinstance(folder, Checkpoints) else Checkpoints(folder, keep_last, keep_best)
        self.every = Every.parse(every) if every is not None else None
        self.monitor = Monitor(monitor, mode)

    def attach(self, trainer: Trainer) -> None:
        """Tell the trainer where and how often."""
        trainer.checkpoints, trainer.save_every, trainer.monitor = self.checkpoints, self.every, self.monitor

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Save the end; a signal has its checkpoint already."""
        if error is None:
            complete = trainer.history and not trainer.cut_short
            trainer.save(score=trainer.score(trainer.history[-1]) if complete else None)
