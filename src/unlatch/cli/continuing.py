"""Which run is continued, and from which of its checkpoints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..io import checkpoint
from ..io.checkpoints import Checkpoints
from ..io.durable import current
from ..io.run_folder import checkpoints_in, is_run
from ..train.snapshot import Saved, facts

__all__ = ["Continued", "checkpoint_at", "continued"]


@dataclass(frozen=True)
class Continued:
    """A run that was begun.

    **Arguments:** `folder`: of the run; `checkpoint`: of all of its own; `saved`: what that one says.
    """

    folder: Path
    checkpoint: Path
    saved: Saved

    def __str__(self) -> str:
        loop = self.saved.loop
        epochs = loop.model_dump().get("epochs", 0)
        under_way = f", {loop.under_way} of them under way" if loop.under_way else ""
        return f"{self.checkpoint}: step {loop.batches}{under_way}, {epochs} epoch{'s'[: epochs != 1]} complete"


def continued(asked: str, out: Path | None = None) -> Continued:
    """The run to continue.

    **Arguments:**

    - `asked`: the folder of a run or of one of its checkpoints; or `"latest"`, the run with the newest checkpoint.
    - `out`: where to look for the latest: a run, or a folder of runs; default: `runs`.
    """
    if asked == "latest":
        folder = _newest_run(out or Path("runs"))
        found = checkpoint_at(folder)
    elif is_run(asked):
        folder, found = Path(asked), checkpoint_at(Path(asked))
    else:
        if not checkpoint.exists(asked):
            raise ConfigError(f"{asked}: no run to continue there; expected the folder of a run or of its checkpoint")
        found = checkpoint_at(Path(asked))
        folder = (found if len(found.parts) > 2 else found.absolute()).parent.parent
        if not is_run(folder) or found.parent.name != checkpoints_in(folder).name:
            raise ConfigError(f"{asked}: a checkpoint, but of no run: expected one of those in a run's checkpoints/")
    return Continued(folder, found, facts(found))


def checkpoint_at(source: Path, *, best: bool = False) -> Path:
    """The latest checkpoint of a run, its best one, or the checkpoint that `source` is itself."""
    if checkpoint.exists(source) and not best:
        return source.parent / os.readlink(source) if source.is_symlink() else source
    kept = Checkpoints(checkpoints_in(source))
    found = kept.best() if best else kept.latest()
    if found is not None:
        return found
    if best:
        raise ConfigError(f"{source}: no checkpoint is marked as the best; train with --keep-best 1")
    if (source / "last" / "model.safetensors").is_file():
        raise ConfigError(
            f"{source}: its checkpoint is of an earlier version, which this one cannot read; its weights alone are in "
            f"{source / 'last' / 'model.safetensors'}"
        )
    if is_run(source):
        raise ConfigError(f"{source}: the run has left no checkpoint; expected one in {checkpoints_in(source)}")
    raise ConfigError(f"{source}: no checkpoint there; expected the folder of a run or of a checkpoint")


def _newest_run(root: Path) -> Path:
    runs = [root] if is_run(root) else [path for path in sorted(root.glob("*")) if is_run(path)]
    saved = {path: found for path in runs if (found := Checkpoints(checkpoints_in(path)).latest()) is not None}
    if not saved:
        raise ConfigError(f"--resume latest: no run with a checkpoint in {root}{os.sep}; name the folder of the run")
    return max(saved, key=lambda path: current(saved[path]).stat().st_mtime_ns)
