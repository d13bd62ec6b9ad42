"""Memory of a PETRA pipeline and of the methods next to it, before anything runs.

With J stages, stage j (from 0) has `2(J-1-j)` micro-batches between their forward and their backward. A method may
keep, for each of them, the stage's input, a copy of the parameters, both, or (PETRA) neither; a stage that is not
reversible must keep its input. Each stage further holds its parameters, its buffers, and one input at work:

    bytes = parameters + buffers + input + delay * input [where kept] + ceil(delay / k) * parameters [where copied]

These are sizes of what a method keeps, not of what computing a stage needs for a moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError, PlanError
from .petra_sizes import StageSize, stage_sizes

__all__ = [
    "CORRECTED",
    "PAPER",
    "SETTINGS",
    "Buffers",
    "Counting",
    "StageMemory",
    "StageSize",
    "buffer_table",
    "plan_memory",
    "stage_sizes",
    "stage_table",
    "total_bytes",
]

GIGABYTE = 1e9


@dataclass(frozen=True)
class Buffers:
    """What is kept for every micro-batch under way: the stage's inputs, copies of its parameters."""

    inputs: bool
    parameters: bool


#: The four settings of the paper, from PipeDream's through DSP's to PETRA's.
SETTINGS = (Buffers(True, True), Buffers(True, False), Buffers(False, True), Buffers(False, False))


@dataclass(frozen=True)
class Counting:
    """What is counted as input.

    **Arguments:**

    - `both_streams`: whether the input of a reversible stage, and of the last one, is two streams or one of them.
    - `stem`: the inputs of a first stage that is not reversible: `"stored"` like any other, `"reread"` from the data
      set, so never kept, or `"paper"`: kept only where all inputs are.
    """

    both_streams: bool = True
    stem: Literal["stored", "reread", "paper"] = "stored"


#: As in the paper's table, with its two slips: one stream for reversible stages, the stem in two of the four rows.
PAPER = Counting(both_streams=False, stem="paper")
CORRECTED = Counting()


@dataclass(frozen=True)
class StageMemory:
    """Bytes that one stage holds: `fifo` for inputs of micro-batches under way, `copies` for their parameters."""

    name: str
    delay: int
    parameters: int
    buffers: int
    input: int
    fifo: int
    copies: int

    @property
    def total(self) -> int:
        return self.parameters + self.buffers + self.input + self.fifo + self.copies


def plan_memory(
    sizes: Sequence[StageSize],
    keep: Buffers = SETTINGS[-1],
    *,
    k: int = 1,
    counting: Counting = CORRECTED,
    delays: Sequence[int] | None = None,
) -> list[StageMemory]:
    """What each stage holds.

    **Arguments:**

    - `sizes`: from `stage_sizes`.
    - `keep`: the buffers of the method; by default PETRA's.
    - `k`: micro-batches per update.
    - `counting`: what counts as input.
    - `delays`: micro-batches between forward and backward, per stage; by default `2(J-1-j)`. Under 1F1B order it is
      `J-1-j`.

    >>> from torch import nn
    >>> sizes = stage_sizes(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), (32, 4))
    >>> [stage.fifo for stage in plan_memory(sizes)]
    [1024, 0]
    """
    if k < 1:
        raise ConfigError(f"k, the micro-batches per update, must be 1 or more, got {k}")
    stages = len(sizes)
    delays = [2 * (stages - 1 - j) for j in range(stages)] if delays is None else list(delays)
    if len(delays) != stages:
        raise PlanError(f"{len(delays)} delays were given for {stages} stages: expected one for each")
    return [
        StageMemory(
            name=size.name,
            delay=delay,
            parameters=size.parameter_bytes,
            buffers=size.buffer_bytes,
            input=_input(size, last=j == stages - 1, counting=counting),
            fifo=delay * _kept(size, keep, counting, first=j == 0, last=j == stages - 1),
            copies=math.ceil(delay / k) * size.parameter_bytes if keep.parameters else 0,
        )
        for j, (size, delay) in enumerate(zip(sizes, delays, strict=True))
    ]


def _input(size: StageSize, *, last: bool, counting: Counting) -> int:
    one = (size.reversible or last) and not counting.both_streams
    return size.stream_bytes if one else size.input_bytes


def _kept(size: StageSize, keep: Buffers, counting: Counting, *, first: bool, last: bool) -> int:
    """Bytes kept per micro-batch under way."""
    if first and not size.reversible:
        if counting.stem == "reread":
            return 0
        if counting.stem == "paper" and not keep.inputs:
            return 0
    return _input(size, last=last, counting=counting) if keep.inputs else size.stored_bytes


def total_bytes(stages: Sequence[StageMemory]) -> int:
    """The sum over all stages."""
    return sum(stage.total for stage in stages)


def buffer_table(
    sizes: Sequence[StageSize], *, k: int = 1, counting: Counting = CORRECTED, delays: Sequence[int] | None = None
) -> str:
    """The four buffer settings side by side, as the paper's table of memory.

    >>> from torch import nn
    >>> print(buffer_table(stage_sizes(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 9)), (4000, 1000))))
    | input buffer | parameter buffer | GB | saving |
    |---|---|---|---|
    | yes | yes | 0.1 | 0.0 % |
    | yes | no | 0.1 | 10.5 % |
    | no | yes | 0.1 | 0.0 % |
    | no | no | 0.1 | 10.5 % |
    """
    totals = [total_bytes(plan_memory(sizes, keep, k=k, counting=counting, delays=delays)) for keep in SETTINGS]
    lines = ["| input buffer | parameter buffer | GB | saving |", "|---|---|---|---|"]
    for keep, total in zip(SETTINGS, totals, strict=True):
        saving = 100 * (1 - total / totals[0])
        answers = " | ".join("yes" if kept else "no" for kept in (keep.inputs, keep.parameters))
        lines.append(f"| {answers} | {total / GIGABYTE:.1f} | {saving:.1f} % |")
    return "\n".join(lines)


def stage_table(stages: Sequence[StageMemory]) -> str:
    """What each stage holds, in megabytes (1e6 bytes).

    >>> from torch import nn
    >>> print(stage_table(plan_memory(stage_sizes(nn.Sequential(nn.Linear(1000, 1000)), (500, 1000)))))
    | stage | delay | parameters | buffers | input | input FIFO | parameter copies | total |
    |---|---|---|---|---|---|---|---|
    | 0 | 0 | 4.0 | 0.0 | 2.0 | 0.0 | 0.0 | 6.0 |
    """
    head = "| stage | delay | parameters | buffers | input | input FIFO | parameter copies | total |"
    lines = [head, "|" + "---|" * 8]
    for stage in stages:
        parts = (stage.parameters, stage.buffers, stage.input, stage.fifo, stage.copies, stage.total)
        lines.append(f"| {stage.name} | {stage.delay} | " + " | ".join(f"{part / 1e6:.1f}" for part in parts) + " |")
    return "\n".join(lines)
