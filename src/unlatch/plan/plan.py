"""Where the work of a chain goes: a cut into stages, or tasks on devices, and what is known about the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, pairwise
from typing import Any, Literal

from ..errors import PlanError
from ..io.space import bytes_text
from ..nn.chain import Block, cut, stage_starts
from ..nn.chain_check import Tie, ties
from ..nn.offer import unfolding
from ..table import Table
from .layer_costs import Number
from .layer_groups import Span
from .partition import contiguous_split, part_costs
from .profile import BlockCost
from .tasks import Task, by_task

__all__ = ["UNEQUAL_REPLICAS", "Plan", "count_parameters", "make_plan"]

#: Why training cannot follow plans in which some stages have more devices than others.
UNEQUAL_REPLICAS = (
    "stages have different numbers of devices, and training replicates all of them alike: plan without --replicate"
)


@dataclass(frozen=True)
class Plan:
    """A chain of blocks in parts, and which device does what.

    Without `tasks` the parts are stages, one per device. With them the parts are layers, whose tasks F, D and G are
    placed one by one.

    >>> plan = Plan(("a", "b", "c"), (0, 2), (0.2, 0.1), (10, 5), measured=True)
    >>> plan.stages, plan.period, round(plan.balance, 2)
    ((('a', 'b'), ('c',)), 0.2, 0.75)
    >>> plan.split, plan.devices
    (('c',), 2)
    >>> from fractions import Fraction
    >>> one = Fraction(1)
    >>> rows = (("F", 0, 0, 0), ("G", 0, 1, 1), ("D", 1, 1, 1), ("F", 1, 1, 1), ("G", 1, 1, 1))
    >>> placed = Plan(("a", "b"), (0, 1), (1, 4), tasks=tuple(Task(kind, l, d, one, slot) for kind, l, d, slot in rows))
    >>> placed.layer_devices, placed.delays, placed.split
    ((0, 1), (1, 0), None)
    """

    #: Names of all blocks.
    blocks: tuple[str, ...]
    #: Position of the first block of each stage or layer.
    starts: tuple[int, ...]
    #: Time that each device computes for one micro-batch: seconds if measured, else in any unit.
    loads: tuple[Number, ...]
    #: Number of parameters of each stage or layer; a tied one counts once. Empty if not known.
    parameters: tuple[int, ...] = ()
    #: Whether `loads` are measured seconds.
    measured: bool = False
    #: Bytes that cross each border forward, one fewer than stages; empty if not known.
    border_bytes: tuple[int, ...] = ()
    #: Where tasks are placed one by one.
    tasks: tuple[Task, ...] = ()
    #: Devices of each stage, where a stage has several.
    replicas: tuple[int, ...] = ()
    #: The method that it was made for, and the options that go with it; empty if any will do.
    method: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    #: Why training cannot follow it; empty if it can.
    analysis: str = ""
    #: What the user should know about how this plan came about.
    note: str = ""
    #: The file that it was read from.
    source: str = field(default="", compare=False)

    @property
    def devices(self) -> int:
        """How many there are, with work or without."""
        return len(self.loads)

    @property
    def busy_devices(self) -> int:
        """How many have something to do."""
        if self.tasks:
            return len({task.device for task in self.tasks})
        return sum(self.replicas) if self.replicas else len(self.starts)

    @property
    def replication(self) -> int:
        """How many replicas of the whole network it is for: 1 where stages differ in that, which training cannot do."""
        return self.replicas[0] if len(set(self.replicas)) == 1 else 1

    @property
    def obstacle(self) -> str:
        """Why training cannot follow it, whoever wrote it; empty if it can."""
        return self.analysis or (UNEQUAL_REPLICAS if len(set(self.replicas)) > 1 else "")

    @property
    def spans(self) -> tuple[Span, ...]:
        """First block of each stage or layer, and the block after its last."""
        return tuple(zip(self.starts, (*self.starts[1:], len(self.blocks)), strict=True))

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Names of the blocks of each stage or layer."""
        return tuple(self.blocks[start:end] for start, end in self.spans)

    @property
    def split(self) -> tuple[str, ...] | None:
        """Names of the blocks that start the second and later stages; `None` where tasks are placed."""
        return None if self.tasks else tuple(self.blocks[start] for start in self.starts[1:])

    @property
    def layer_devices(self) -> tuple[int, ...]:
        """Where tasks are placed: the device of each layer's forward, which holds its weights."""
        shares = by_task(self.tasks)
        return tuple(shares["F", layer][0].device for layer in range(len(self.starts))) if self.tasks else ()

    @property
    def delays(self) -> tuple[int, ...]:
        """Where tasks are placed, per layer: micro-batches between the weights of a gradient and those it changes."""
        shares = by_task(self.tasks)
        layers = range(len(self.starts)) if self.tasks else ()
        return tuple(shares["G", layer][0].slot - shares["F", layer][0].slot for layer in layers)

    @property
    def period(self) -> float | None:
        """Predicted seconds per micro-batch when all devices work at the same time; `None` if not measured."""
        return float(max(self.loads)) if self.measured else None

    @property
    def balance(self) -> float:
        """Mean load over the largest: 1 if even, 1/devices if one device does all the work."""
        largest = max(self.loads)
        return float(sum(self.loads) / len(self.loads) / largest) if largest > 0 else 1.0

    def check(self) -> Plan:
        """Raise `PlanError` unless training can follow this plan; return it otherwise."""
        named = f"the plan file {self.source}" if self.source else "this plan"
        if self.obstacle:
            raise PlanError(f"{named} is for analysis only: {self.obstacle}")
        if not self.tasks:
            return self
        used = {task.device for task in self.tasks}
        idle = [device for device in range(self.devices) if device not in used]
        if idle:
            raise PlanError(
                f"{len(self.starts)} layers give {self.devices} devices too little to do: {idle} would be idle. "
                f"Ask for at most {self.devices - len(idle)} stages"
            )
        where = self.layer_devices
        if where[0] != 0 or any(a > b for a, b in pairwise(where)):
            raise PlanError(f"forwards must run on growing devices from 0 on, got {where}: use a plan in a row")
        for (kind, layer), shares in by_task(self.tasks).items():
            if sum(share.fraction for share in shares) != 1 or (kind in "FGH" and len(shares) > 1):
                raise PlanError(f"the shares of {kind} of layer {layer} do not make one task: {shares}")
        return self

    def __str__(self) -> str:
        lines = self._task_lines() if self.tasks else self.table().lines()
        return "\n".join([*lines, f"balance {self.balance:.0%}" + (f"; {self.note}" if self.note else "")])

    def _repr_html_(self) -> str:
        """For notebooks: blocks, parameters and time of each stage, and what crosses each cut."""
        if self.tasks:
            return f"<pre>{escape(str(self))}</pre>"
        found = self.table()
        sent = [*map(bytes_text, self.border_bytes), "-"] if self.border_bytes else ["not measured"] * len(found.rows)
        rows = [(*row, crossing) for row, crossing in zip(found.rows, sent, strict=True)]
        below = "".join(f"<div>{escape(line)}</div>" for line in (f"balance {self.balance:.0%}", self.note) if line)
        return Table((*found.heads, "sent up"), rows).html() + below

    def table(self) -> Table:
        """One row per stage: its number, blocks, parameters, and time or cost."""
        unit, scale = ("ms/micro-batch", 1e3) if self.measured else ("relative cost", 1 / float(sum(self.loads) or 1))
        rows = []
        # Replicas of a stage stand side by side, and each has the same load.
        firsts = accumulate(self.replicas or [1] * len(self.starts), initial=0)
        for stage, (names, first) in enumerate(zip(self.stages, firsts, strict=False)):
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
            rows.append((str(stage), span, self._parameters(stage), f"{self.loads[first] * scale:.3g}"))
        return Table(("stage", "blocks", "parameters", unit), rows, left=(1,))

    def _task_lines(self) -> list[str]:
        unit, scale = ("ms", 1e3) if self.measured else ("relative", 1 / float(sum(self.loads) or 1))
        lines = []
        for device, load in enumerate(self.loads):
            mine = [_shown(task) for task in self.tasks if task.device == device]
            lines.append(f"device {device}: {' '.join(mine)}  ({float(load) * scale:.3g} {unit})")
        for layer, (names, delay) in enumerate(zip(self.stages, self.delays, strict=True)):
            span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
            lines.append(f"layer {layer}: {span}, {self._parameters(layer)} parameters, delay {delay}")
        return lines

    def _parameters(self, part: int) -> str:
        return f"{self.parameters[part]:,}" if self.parameters else "?"


def _shown(task: Task) -> str:
    share = "" if task.fraction == 1 else f"*{float(task.fraction):.2g}"
    return f"{task.kind}{task.layer}{share}@{task.slot}"


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
            f"list smaller blocks. The blocks are: {', '.join(block.name for block in blocks)}.{unfolding(blocks)}"
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
        loads=tuple(part_costs(inner, starts, last=last)),
        parameters=tuple(count_parameters(part) for part in cut(blocks, starts)),
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
        counts = [1.0 + count_parameters([block]) for block in blocks]
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
            f"{_describe(blocks, tied)}: what they share must lie in one stage; use separate "
            "ones or ask for fewer stages"
        )
    ends = [*allowed[1:], len(blocks)]
    groups = [[sum(values[a:b]) for a, b in zip(allowed, ends, strict=True)] for values in (inner, last)]
    return [allowed[group] for group in contiguous_split(groups[0], stages, last=groups[1])]


def _describe(blocks: Sequence[Block], tied: Sequence[Tie]) -> str:
    widest = max(tied, key=lambda tie: tie.second - tie.first)
    return f"blocks '{blocks[widest.first].name}' and '{blocks[widest.second].name}' share {widest.what}"


def count_parameters(part: Sequence[Block]) -> int:
    """Parameters of a run of blocks; a tied one counts once."""
    unique = {id(parameter): parameter.numel() for block in part for parameter in block.module.parameters()}
    return sum(unique.values())
