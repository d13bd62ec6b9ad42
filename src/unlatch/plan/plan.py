"""Where a chain of blocks is cut, and what is known about the stages that result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import PlanError
from ..nn.chain import Block, cut, stage_starts
from ..nn.chain_check import Tie, ties
from .partition import contiguous_split, part_costs
from .profile import BlockCost

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """A cut of a chain into stages.

    >>> plan = Plan(("a", "b", "c"), (0, 2), (0.2, 0.1), (10, 5), measured=True)
    >>> plan.stages, plan.period, round(plan.balance, 2)
    ((('a', 'b'), ('c',)), 0.2, 0.75)
    >>> plan.split
    ('c',)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    #: Names of all blocks.
    blocks: tuple[str, ...]
    #: Position of the first block of each stage.
    starts: tuple[int, ...]
    #: Cost of each stage for one micro-batch: seconds if measured, else a number in proportion to its parameters.
    stage_costs: tuple[float, ...]
    #: Number of parameters of each stage; a tied one counts once.
    parameters: tuple[int, ...]
    #: Whether `stage_costs` are measured seconds.
    measured: bool = False
    #: Bytes that cross each border forward, one fewer than stages; empty if not measured.
    border_bytes: tuple[int, ...] = ()
    #: What the user should know about how this plan came about.
    note: str = ""

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of the blocks of each stage."""
        ends = (*self.starts[1:], len(self.blocks))
        return tuple(self.blocks[start:end] for start, end in zip(self.starts, ends, strict=True))

    @property
    def split(self) -> tuple[str, ...] | None:
        """Names of the blocks that start the second and later stages: as `split=` they give this cut again."""
        return tuple(self.blocks[start] for start in self.starts[1:])

    @property
    def period(self) -> float | None:
        """Predicted seconds per micro-batch when all stages work at the same time; `None` if not measured."""
        return max(self.stage_costs) if self.measured else None

    @property
    def balance(self) -> float:
        """Mean cost of a stage over the largest: 1 if even, 1/stages if one stage does all the work."""
        largest = max(self.stage_costs)
        return sum(self.stage_costs) / len(self.stage_costs) / largest if largest > 0 else 1.0

    def to_json(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and texts, with what follows from it for readers."""
        return asdict(self) | {"period": self.period, "balance": self.balance}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`, also after a trip through text."""
        values: dict[str, Any] = {
            name: tuple(data[name]) if isinstance(data[name], list | tuple) else data[name]
            for name in cls.__dataclass_fields__
            if name in data
        }
        return cls(**values)

    def __str__(self) -> str:
        unit = "ms/micro-batch" if self.measured else "relative cost"
        rows = [("stage", "blocks", "parameters", unit)]
        scale = 1e3 if self.measured else 1.0 / (sum(self.stage_costs) or 1.0)
        for stage, (names, count, cost) in enumerate(zip(self.stages, self.parameters, self.stage_costs, strict=True)):
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
            rows.append((str(stage), span, f"{count:,}", f"{cost * scale:.3g}"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        sides = list(zip("><>>", widths, strict=True))
        lines = ["  ".join(f"{cell:{side}{n}}" for cell, (side, n) in zip(row, sides, strict=True)) for row in rows]
        lines.append(f"balance {self.balance:.0%}" + (f"; {self.note}" if self.note else ""))
        return "\n".join(lines)


def make_plan(
    blocks: Sequence[Block],
    stages: int,
    *,
    costs: Sequence[BlockCost] | None = None,
    recompute: bool = False,
    split: Literal["auto"] | Sequence[str] = "auto",
) -> Plan:
    """Decide where to cut.

    **Arguments:**

    - `blocks`: the chain.
    - `stages`: how many parts.
    - `costs`: from `profile`; without them stages are balanced by their number of parameters, and the note says so.
    - `recompute`: whether every stage but the last runs its forward twice.
    - `split`: `"auto"`, or names of the blocks that start a stage. Blocks with tied weights are never separated by
        `"auto"`.

    >>> from torch import nn
    >>> from ..nn.chain import chain
    >>> plan = make_plan(chain([nn.Linear(8, 8) for _ in range(4)]), 2)
    >>> plan.starts
    (0, 2)
    """
    if stages < 1 or stages > len(blocks):
        raise PlanError(
            f"{len(blocks)} blocks can be cut into 1 to {len(blocks)} stages, not {stages}: ask for fewer stages or "
            f"list smaller blocks. The blocks are: {', '.join(block.name for block in blocks)}"
        )
    if costs is not None and len(costs) != len(blocks):
        raise PlanError(f"there are {len(blocks)} blocks but costs of {len(costs)}")
    inner, last = _block_costs(blocks, costs, recompute)
    if split == "auto":
        starts = _balanced(blocks, stages, inner, last)
    else:
        starts = stage_starts(blocks, split)
        if len(starts) != stages:
            raise PlanError(
                f"the split {list(split)} makes {len(starts)} stages, but {stages} are asked for: "
                f"name the {stages - 1} blocks that start the second and later stages"
            )
    guessed = costs is None and split == "auto" and 1 < stages < len(blocks)
    return Plan(
        blocks=tuple(block.name for block in blocks),
        starts=tuple(starts),
        stage_costs=tuple(part_costs(inner, starts, last=last)),
        parameters=tuple(_count_parameters(part) for part in cut(blocks, starts)),
        measured=costs is not None,
        border_bytes=tuple(costs[start - 1].output_bytes for start in starts[1:]) if costs is not None else (),
        note="balanced by number of parameters, not by measured time: pass a sample to measure" if guessed else "",
    )


def _block_costs(
    blocks: Sequence[Block], costs: Sequence[BlockCost] | None, recompute: bool
) -> tuple[list[float], list[float]]:
    """Cost of each block in an ordinary stage and in the last one."""
    if costs is None:
        # A block without parameters is not free; and a chain of such blocks should be cut evenly.
        counts = [1.0 + _count_parameters([block]) for block in blocks]
        return counts, counts
    last = [cost.forward + cost.input_grad + cost.weight_grad for cost in costs]
    inner = [total + (cost.forward if recompute else 0.0) for total, cost in zip(last, costs, strict=True)]
    return inner, last


def _balanced(blocks: Sequence[Block], stages: int, inner: Sequence[float], last: Sequence[float]) -> list[int]:
    """The best cut that keeps tied blocks together: they are one item to the partitioner."""
    tied = ties(blocks)
    inside = {position for tie in tied for position in range(tie.first + 1, tie.second + 1)}
    allowed = [position for position in range(len(blocks)) if position not in inside]
    if len(allowed) < stages:
        raise PlanError(
            f"only {len(allowed)} stage{'s are' if len(allowed) > 1 else ' is'} possible, not {stages}, because "
            f"{_describe(blocks, tied)}: tied weights must lie in one stage; untie them or ask for fewer stages"
        )
    ends = [*allowed[1:], len(blocks)]
    groups = [[sum(values[a:b]) for a, b in zip(allowed, ends, strict=True)] for values in (inner, last)]
    return [allowed[group] for group in contiguous_split(groups[0], stages, last=groups[1])]


def _describe(blocks: Sequence[Block], tied: Sequence[Tie]) -> str:
    widest = max(tied, key=lambda tie: tie.second - tie.first)
    return f"blocks '{blocks[widest.first].name}' and '{blocks[widest.second].name}' share {widest.what}"


def _count_parameters(part: Sequence[Block]) -> int:
    unique = {id(parameter): parameter.numel() for block in part for parameter in block.module.parameters()}
    return sum(unique.values())
