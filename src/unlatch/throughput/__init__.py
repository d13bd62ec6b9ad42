"""How fast a model trains here, by every system that can train it: plain PyTorch, DDP, torch's pipelines, our methods.

`subject` says what is trained, `systems` who trains it (read it first), `torch_pipeline` is one of them, `field` lists
all, `session` lets them take turns on the same ranks and makes rows, `picture` draws these. `timing` and `resident`
measure one of them. `unlatch bench throughput` and `benchmarks/pipeline_speed.py` are built on this.
"""

from __future__ import annotations

from .field import everybody
from .picture import draw
from .session import Row, compare
from .subject import Subject
from .systems import DDP, Independent, Ours, Plain, System, Unsuitable
from .torch_pipeline import TorchPipeline

__all__ = [
    "DDP",
    "Independent",
    "Ours",
    "Plain",
    "Row",
    "Subject",
    "System",
    "TorchPipeline",
    "Unsuitable",
    "compare",
    "draw",
    "everybody",
]
