"""Callbacks that are ready for use: `unlatch.Trainer(run, callbacks=[...])` tells each of them what happens.

`Callback` (in `train/callback.py`) is the base of all, yours included. Numbers go one way: whoever has some calls
`trainer.log`, and `MetricsFiles`, `TensorBoard` and `RunFolder` write them down. What is exported here is public.
"""

from ..train.callback import Callback
from .average import EMA
from .folder import RunFolder
from .keeping import Checkpointing
from .live import Live
from .logs import LearningRates, MetricsFiles, TensorBoard
from .probing import GradientProbing
from .progress import Progress
from .stopping import EarlyStopping

__all__ = [
    "EMA",
    "Callback",
    "Checkpointing",
    "EarlyStopping",
    "GradientProbing",
    "LearningRates",
    "Live",
    "MetricsFiles",
    "Progress",
    "RunFolder",
    "TensorBoard",
]
