"""Times the work of local methods by part, records it as events, and says where it failed if it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..errors import StageFailed, UnlatchError
from .events import Event, Recorder
from .micro import Micro
from .stage import Stage

__all__ = ["Clock"]

#: The letter of each part in events; `A` is work that backpropagation does not have.
_LETTERS = {"forward": "F", "backward": "B", "update": "U"}


class Clock:
    """Runs pieces of work of one stage.

    **Arguments:** `stage`: whose work it is; `recorder`: of the run.
    """

    def __init__(self, stage: Stage, recorder: Recorder) -> None:
        self.seconds: dict[str, float] = {}
        self._stage = stage
        self._recorder = recorder

    def __call__(self, part: str, micro: Micro, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`work(*args, **options)`, timed as `part`."""
        stage = self._stage
        version, start = stage.version, time.perf_counter()
        try:
            result = work(*args, **options)
        except UnlatchError:
            raise
        except Exception as error:
            what = part.replace("_", " ")
            raise StageFailed(
                f"stage {stage.index} failed in the {what} of {micro}: {type(error).__name__}: {error}"
            ) from error
        end = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + end - start
        number = micro.update if part == "update" else micro.id
        letter = _LETTERS.get(part, "A")
        self._recorder.add(Event(stage.index, letter, number, version, start, end, stage.kept_bytes))
        return result
