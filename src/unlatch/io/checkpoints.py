"""The checkpoints of one run: a folder per step, and which of them is the latest and the best.

checkpoints/
  step-00000400/   one checkpoint, see `checkpoint`
  step-00000450/
  latest -> step-00000450
  best -> step-00000400
  scores.json      of those steps that were evaluated
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointMismatch, ConfigError
from . import checkpoint, durable

__all__ = ["Checkpoints"]

_STEP = re.compile(r"step-(\d{8,})")
# What a writer that was killed leaves.
_LEFT_BEHIND = re.compile(r"\.(step-\d{8,})\.(?:tmp-.*|old)")
_SCORES = "scores.json"


class Checkpoints:
    """A folder that keeps the last few checkpoints of a run and, if asked to, the best.

    **Arguments:**

    - `folder`: made when the first checkpoint is written.
    - `keep_last`: checkpoints to keep; older ones are deleted, except the best.
    - `keep_best`: further ones to keep, by the highest score.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as root:
    ...     kept = Checkpoints(root, keep_last=2)
    ...     for step in (10, 20, 30):
    ...         checkpoint.write(kept.path(step), checkpoint.Checkpoint({"w": torch.ones(1)}, {}))
    ...         kept.landed(step)
    ...     kept.steps(), kept.latest().name
    ([20, 30], 'step-00000030')
    """

    def __init__(self, folder: str | Path, keep_last: int = 2, keep_best: int = 0) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ConfigError(f"keep_last must be at least 1 and keep_best at least 0, got {keep_last}, {keep_best}")
        self.folder = Path(folder)
        self.keep_last, self.keep_best = keep_last, keep_best

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        found = [(_STEP.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted(int(match[1]) for match, path in found if match and checkpoint.exists(path))

    def latest(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        return self._linked("latest") or next((self.path(step) for step in reversed(self.steps())), None)

    def best(self) -> Path | None:
        """The checkpoint with the highest score, if any has one."""
        return self._linked("best")

    def landed(self, step: int, score: float | None = None) -> None:
        """Make the checkpoint that was written to `path(step)` the latest one, and delete what need not be kept."""
        scores = self._scores()
        if score is not None and math.isfinite(score):
            scores[step] = score
        kept = [s for s in self.steps() if s <= step]
        best = sorted((s for s in kept if s in scores), key=lambda s: (scores[s], s), reverse=True)
        stay = {step, *kept[-self.keep_last :], *best[: self.keep_best]}
        durable.write_text(self.folder / _SCORES, json.dumps({s: scores[s] for s in sorted(stay) if s in scores}))
        if self.keep_best and best:
            self._link("best", best[0])
        self._link("latest", step)
        for old in kept:
            if old not in stay:
                shutil.rmtree(self.path(old), ignore_errors=True)
        for name in {match[1] for path in self.folder.iterdir() if (match := _LEFT_BEHIND.fullmatch(path.name))}:
            durable.tidy(self.folder / name)

    def go_back(self, step: int) -> None:
        """Make an earlier checkpoint the latest one again; the others stay for now."""
        self._link("latest", step)

    def _linked(self, name: str) -> Path | None:
        link = self.folder / name
        if not link.is_symlink():
            return None
        target = self.folder / os.readlink(link)
        # A link that was moved by hand must not lead elsewhere.
        sound = _STEP.fullmatch(os.readlink(link)) and checkpoint.exists(target)
        return target if sound else None

    def _link(self, name: str, step: int) -> None:
        draft = self.folder / f".{name}.tmp"
        draft.unlink(missing_ok=True)
        draft.symlink_to(self.path(step).name)
        os.replace(draft, self.folder / name)
        durable.sync(self.folder, files=False)

    def _scores(self) -> dict[int, float]:
        file = self.folder / _SCORES
        if not file.exists():
            return {}
        try:
            return {int(step): float(score) for step, score in json.loads(file.read_text(encoding="utf-8")).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointMismatch(
                f"{file}: expected a JSON object of steps and their scores ({error}); delete it to go on without"
            ) from None
