"""From a chain of blocks to a `Plan`: what blocks cost, where to cut, which task where, and how much memory it takes.

`plan` has the one plan type (read it first), `plan_file` its file. `profile`, `layer_costs` and `model_costs` say what
layers cost, `partition` finds cuts. `tasks`, `dataflow` and `retiming` are the task graph that planners, executor,
simulator and memory pass (`memory`) all read; `layerpipe` and `pipedream` are planners. Exported names are public.
"""

from __future__ import annotations

from .jitter import jitter
from .partition import contiguous_split, part_costs
from .plan import Plan, make_plan
from .plan_file import plan_from_json, plan_to_json, read_plan
from .profile import BlockCost, profile

__all__ = [
    "BlockCost",
    "Plan",
    "contiguous_split",
    "jitter",
    "make_plan",
    "part_costs",
    "plan_from_json",
    "plan_to_json",
    "profile",
    "read_plan",
]
