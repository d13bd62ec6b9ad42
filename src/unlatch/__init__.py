"""Unlatch: train deep networks without lock-step backpropagation."""

from . import data, errors, methods, models, nn, schedule
from .io.checkpoints import Checkpoints
from .train import Epoch, Run, StageStatistics, StepResult, Trainer, parallelize
from .transport.faults import Faults
from .transport.launch import Ranks, launch

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
    "data",
    "errors",
    "launch",
    "methods",
    "models",
    "nn",
    "parallelize",
    "schedule",
]
