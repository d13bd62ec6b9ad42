"""What users call."""

from .parallelize import parallelize
from .run import Run, StepResult
from .statistics import StageStatistics
from .trainer import Epoch, Trainer

__all__ = ["Epoch", "Run", "StageStatistics", "StepResult", "Trainer", "parallelize"]
