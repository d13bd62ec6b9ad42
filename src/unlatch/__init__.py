"""Unlatch: train deep networks without lock-step backpropagation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from . import callbacks, data, methods, metrics, models, nn, optim, schedule
    from .io.checkpoints import Checkpoints
    from .train import Epoch, Run, StageStatistics, StepResult, Trainer, parallelize
    from .transport.faults import Faults
    from .transport.launch import Ranks, launch
else:
    # What is public is imported when it is first asked for: torch takes seconds, and the command line, which begins
    # here as well, must answer to signals from its first moment on.
    _HOMES = {
        "Checkpoints": "io.checkpoints",
        "Faults": "transport.faults",
        **dict.fromkeys(("Epoch", "Run", "StageStatistics", "StepResult", "Trainer", "parallelize"), "train"),
        **dict.fromkeys(("Ranks", "launch"), "transport.launch"),
    }
    _ROOMS = {"callbacks", "data", "methods", "metrics", "models", "nn", "optim", "schedule"}

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif name in _ROOMS:
            found = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "Epoch",
    "Faults",
    "Ranks",
    "Run",
    "StageStatistics",
    "StepResult",
    "Trainer",
    "callbacks",
    "data",
    "errors",
    "launch",
    "methods",
    "metrics",
    "models",
    "nn",
    "optim",
    "parallelize",
    "schedule",
]
