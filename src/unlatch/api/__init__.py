"""What users call."""

from .parallelize import parallelize
from .run import Epoch, Run, StepResult
from .statistics import StageStatistics

__all__ = ["Epoch", "Run", "StageStatistics", "StepResult", "parallelize"]
