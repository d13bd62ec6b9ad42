"""What each rank does just now, as a small file in the folder of the run: for whoever follows it meanwhile."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..io.run_folder import live_file
from ..runtime.events import costs_of_kinds
from ..train import Callback, Epoch, StepResult, Trainer
from ..train.measured import recently
from ..transport.restarts import restarts
from .progress import steps_of

__all__ = ["Live"]

log = logging.getLogger(__name__)

#: Actions that a rank tells of: some dozen batches, which is what fits a picture.
_MOST = 400


class Live(Callback):
    """Writes what each rank did last to the run's folder, once a second, so that `unlatch show` can follow it.

    Results do not change, and a rank waits for nobody: it replaces a file of its own of some 30 kB, `live/rank0.json`.
    Beside `RunFolder`, which writes all else that is shown.

    **Arguments:**

    - `folder`: of the run, as in `RunFolder`.
    - `notes`: what whoever looks should know from the start.
    """

    def __init__(self, folder: str | Path, notes: Sequence[str] = ()) -> None:
        self.folder, self.notes = Path(folder), list(notes)
        # Ranks of one machine share this clock, whose zero says nothing to others.
        self._since = time.time() - time.perf_counter()
        self._second = 0
        self._pace: tuple[float, int] | None = None
        self._can_write = True

    def on_start(self, trainer: Trainer) -> None:
        """Forget what an earlier session has left."""
        self._pace, self._can_write = None, True
        if trainer.rank == 0:
            for file in live_file(self.folder, 0).parent.glob("rank*.json"):
                file.unlink(missing_ok=True)
            self._write(trainer)

    def on_step(self, trainer: Trainer, result: StepResult) -> None:
        """Write with the first step of every second: so all ranks tell of the same time."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._write(trainer)

    def on_epoch(self, trainer: Trainer, epoch: Epoch) -> None:
        """Evaluation is no training: the pace is that of what follows."""
        self._pace = None

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the last state, with the reason if it is an error."""
        self._write(trainer, ended=True, error=error)

    def _write(self, trainer: Trainer, **end: Any) -> None:
        # On another host the folder of the run may be none of this one's.
        if not self._can_write or not self.folder.is_dir():
            return
        file = live_file(self.folder, trainer.rank)
        draft = file.with_name(f".{file.name}.tmp")
        try:
            file.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps(self._state(trainer, **end)), encoding="utf-8")
            draft.replace(file)
        except OSError as problem:
            self._can_write = False
            log.warning("%s: %s; nothing more is shown of rank %d", file, problem.strerror, trainer.rank)

    def _state(self, trainer: Trainer, ended: bool = False, error: BaseException | None = None) -> dict[str, Any]:
        run, method = trainer.run, trainer.run.method
        events, stages = recently(run, _MOST)
        return {
            "time": time.time(),
            "pid": os.getpid(),
            "rank": trainer.rank,
            "ranks": trainer.ranks,
            "restarts": restarts(),
            "method": method.name,
            "method_in_full": repr(method),
            "measures": dict(method.measures),
            "step": run.batches,
            "steps": steps_of(trainer),
            "epoch": trainer.epochs,
            "epochs": trainer.until,
            "samples_per_second": self._speed(trainer),
            "notes": [*self.notes, *run.notes],
            "ended": ended,
            "error": f"{type(error).__name__}: {error}" if error is not None else None,
            "stages": stages,
            "kinds": costs_of_kinds(events),
            "events": [
                [e.stage, e.kind, e.batch, e.version, *(round(t + self._since, 6) for t in (e.start, e.end)), e.bytes]
                for e in events
            ],
        }

    def _speed(self, trainer: Trainer) -> float | None:
        """Samples per second since the file before this one."""
        now, step = time.perf_counter(), trainer.run.batches
        before, self._pace = self._pace, (now, step)
        samples = (trainer.batch_size or 0) * trainer.run.method.joined
        if before is None or not samples or step <= before[1]:
            return None
        return samples * (step - before[1]) / (now - before[0])
