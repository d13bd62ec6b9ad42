"""How fast a model trains here, by every system that can train it: plain PyTorch, DDP, torch's pipelines, our methods.

`subject` says what is trained, `systems` who trains it (read it first), `torch_pipeline` is one of them, `field` lists
all, `session` lets them take turns on the same ranks and makes rows, `picture` draws these. `timing` and `resident`
measure one of them. `this_machine` measures what comes on top of all work: messages and actions. `unlatch bench
throughput` and `benchmarks/pipeline_speed.py` are built on this.
"""

from __future__ import annotations

from .field import everybody
from .picture import draw
from .session import Row, compare, lasting_ranks
from .subject import Subject
from .systems import DDP, Independent, Ours, Plain, System, Unsuitable
from .this_machine import Courier, MachineCosts, action_seconds, channel, machine_costs
from .torch_pipeline import TorchPipeline

__all__ = [
    "DDP",
    "Courier",
    "Independent",
    "MachineCosts",
    "Ours",
    "Plain",
    "Row",
    "Subject",
    "System",
    "TorchPipeline",
    "Unsuitable",
    "action_seconds",
    "channel",
    "compare",
    "draw",
    "everybody",
    "lasting_ranks",
    "machine_costs",
]
