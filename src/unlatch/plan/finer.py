"""Whether it pays to cut inside of blocks: stages become more even, but two tensors cross such a border instead of one.

Costs are measured in parts, once. A plan of whole blocks is kept unless one in parts is faster by more than a
measurement can be wrong, with the time of messages counted in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch

from ..nn.chain import Block
from ..nn.chain_check import ties
from ..nn.parts import in_parts, part_names
from .partition import contiguous_split, part_costs
from .plan import Plan, block_costs, make_plan
from .profile import BlockCost

__all__ = ["finer_plan", "whole_costs"]

#: A finer cut must be at least so much faster.
_WORTH_IT = 0.97
#: A message is copied out of the state and into it again, on its way up and as a gradient on its way down.
_COPIES = 4


def whole_costs(blocks: Sequence[Block], costs: Sequence[BlockCost]) -> list[BlockCost]:
    """Costs of a chain with some of its blocks in parts, or none, from those of all parts."""
    by_name = {cost.name: cost for cost in costs}
    found = []
    for block in blocks:
        mine = [by_name[name] for name in part_names(block) if name in by_name]
        found.append(
            BlockCost(
                block.name,
                sum(cost.forward for cost in mine),
                sum(cost.input_grad for cost in mine),
                sum(cost.weight_grad for cost in mine),
                mine[-1].output_bytes,
                sum(cost.kept_bytes for cost in mine),
                sum(cost.weight_bytes for cost in mine),
            )
        )
    return found


def finer_plan(
    plan: Plan,
    blocks: Sequence[Block],
    costs: Sequence[BlockCost],
    *,
    recompute: bool = False,
    seconds_per_byte: float | None = None,
) -> Plan:
    """The plan itself, or one with cuts inside of blocks where that is faster.

    **Arguments:**

    - `plan`: the best one of whole blocks.
    - `blocks`: whole ones.
    - `costs`: of all parts, from a profile of `in_parts(blocks)`.
    - `recompute`: as for `make_plan`.
    - `seconds_per_byte`: that a message costs each of the two stages; measured by default.
    """
    parts, stages = in_parts(blocks), len(plan.starts)
    if len(parts) == len(blocks) or stages < 2 or ties(blocks):
        return plan
    largest = max(cost.output_bytes for cost in costs)
    pace = _COPIES * _copying(largest) if seconds_per_byte is None else seconds_per_byte

    def slowest(of: Sequence[BlockCost], starts: Sequence[int]) -> float:
        inner, last = block_costs(of, recompute)
        return max(part_costs(inner, starts, last=last, borders=_borders(of, pace)))

    inner, last = block_costs(costs, recompute)
    starts = contiguous_split(inner, stages, last=last, borders=_borders(costs, pace))
    if slowest(costs, starts) > _WORTH_IT * slowest(whole_costs(blocks, costs), plan.starts):
        return plan
    split = [parts[start].name for start in starts[1:]]
    chosen = in_parts(blocks, split)
    if len(chosen) == len(blocks):
        return plan
    return make_plan(chosen, stages, costs=whole_costs(chosen, costs), recompute=recompute, split=split)


def _borders(costs: Sequence[BlockCost], pace: float) -> list[float]:
    return [0.0, *(pace * cost.output_bytes for cost in costs[:-1])]


def _copying(size: int) -> float:
    """Seconds per byte that a copy of so many takes here."""
    source = torch.empty(max(size, 1 << 16), dtype=torch.uint8)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(5):
        begun = perf_counter()
        target.copy_(source)
        best = min(best, perf_counter() - begun)
    return best / source.numel()
