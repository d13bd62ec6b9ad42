"""What users call: `parallelize` makes a `Run`, and `Trainer` trains it.

Read `parallelize` first; `handshake` compares what ranks mean, `wiring` builds the engine of a rank and its links.
`run` is the machine, `trainer` the session around it, in `epoch`s, which tells `callback`s what happens and what was
`measured`; `snapshot` checkpoints of both, `exact` what is under way in them, `saving` writes one beside training.
`guard` stops, or goes back, where something is not finite. `statistics` is what is measured, `probe` and `reversal`
watch gradients and inverses, `batching` joins batches. What is exported here is public.
"""

from .callback import Callback
from .epoch import Epoch, Monitor
from .parallelize import parallelize
from .run import Run, StepResult
from .statistics import StageStatistics
from .trainer import Every, Trainer

__all__ = [
    "Callback",
    "Epoch",
    "Every",
    "Monitor",
    "Run",
    "StageStatistics",
    "StepResult",
    "Trainer",
    "parallelize",
]
