"""Every error a user can meet, each saying what was expected, what came, where, and what to do."""

from __future__ import annotations

import signal

__all__ = [
    "CallbackFailed",
    "CheckpointMismatch",
    "CompileFailed",
    "ConfigError",
    "DataError",
    "Interrupted",
    "NoProgress",
    "NonFinite",
    "NonFiniteLoss",
    "OutOfStep",
    "PeerLost",
    "PlanError",
    "ScheduleError",
    "ShapeMismatch",
    "StageFailed",
    "TransportError",
    "UnlatchError",
]


class UnlatchError(Exception):
    """Base of all errors raised on purpose by Unlatch.

    The command line prints their text without a stack trace: they describe a situation, not a defect.
    """


class ConfigError(UnlatchError):
    """A setting is unknown, of the wrong kind, or contradicts another one."""


class DataError(UnlatchError):
    """A data set is missing, incomplete, or not in a format that can be read."""


class PlanError(UnlatchError):
    """The model cannot be cut as asked: bad split, tied weights, uncovered parameters."""


class ScheduleError(UnlatchError):
    """A schedule is incomplete, out of order, or would wait for itself."""


class ShapeMismatch(UnlatchError):
    """A tensor does not have the shape, dtype or structure that its place requires."""


class CheckpointMismatch(UnlatchError):
    """A checkpoint is damaged or does not belong to this model."""


class TransportError(UnlatchError):
    """A message is not the one that the schedule calls for."""


class NonFinite(UnlatchError):
    """A gradient, weight or loss became NaN or infinite; nothing was done with it.

    **Arguments:**

    - `subject`: what it was.
    - `where`: stage and progress.
    - `batches`: the first and last batch that may have caused it, once that is known.
    - `outcome`: what was done about it.

    >>> print(NonFinite("the gradient of 0.weight is not finite", "stage 0", (4, 4)))
    the gradient of 0.weight is not finite in batch 4 (stage 0). Lower the learning rate, clip gradients \
(clip_grad_norm=1.0) or, if the method delays, raise microbatches.
    """

    def __init__(
        self, subject: str, where: str, batches: tuple[int, int] | None = None, outcome: str | None = None
    ) -> None:
        super().__init__(subject, where, batches, outcome)
        self.subject, self.where = subject, where
        self.batches, self.outcome = batches, outcome

    def __reduce__(self) -> tuple[type[NonFinite], tuple[str, str, tuple[int, int] | None, str | None]]:
        return type(self), (self.subject, self.where, self.batches, self.outcome)

    def __str__(self) -> str:
        outcome = "" if self.outcome is None else f" {self.outcome}"
        return (
            f"{self.found}. Lower the learning rate, clip gradients (clip_grad_norm=1.0) or, if the method delays, "
            f"raise microbatches.{outcome}"
        )

    @property
    def found(self) -> str:
        """What it was and where."""
        return f"{self.subject}{self._when()} ({self.where})"

    def _when(self) -> str:
        if self.batches is None:
            return ""
        first, last = self.batches
        return f" in batch {first}" if first == last else f" in one of the batches {first} to {last}"


class NonFiniteLoss(NonFinite):
    """The loss became NaN or infinite."""

    def _when(self) -> str:
        return ""


class StageFailed(UnlatchError):
    """User code raised inside a stage; the original exception is the cause."""


class CompileFailed(UnlatchError):
    """The compiler made no code of a stage, which runs without; its own error is the cause."""


class CallbackFailed(UnlatchError):
    """A callback raised; the original exception is the cause. The run itself is sound, and saved if it can be."""


class PeerLost(UnlatchError):
    """Another rank died, stalled or stopped on an error of its own."""


class OutOfStep(UnlatchError):
    """Ranks call different methods of a run, or not equally often, and would wait for each other for ever."""


class NoProgress(UnlatchError):
    """Ranks that were started anew failed again before there was a newer checkpoint."""


class Interrupted(SystemExit):
    """A signal asked the run to stop, and it has: after a checkpoint where there is somewhere to write it.

    A script that does not catch it ends without a traceback and with the exit code that shells and schedulers expect.

    >>> Interrupted(15).code
    143

    **Arguments:** `number`: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = int(number)

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.number).name}"

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        return type(self), (self.number,)
