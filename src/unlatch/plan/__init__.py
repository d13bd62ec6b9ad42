"""From a chain of blocks to stages: measure what blocks cost, and find the best cut."""

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
