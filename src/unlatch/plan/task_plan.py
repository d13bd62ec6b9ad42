"""A placement of tasks that an executor can follow: which blocks form a layer, and who does which task of it when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from ..errors import PlanError
from .layer_costs import exact, plain
from .plan import Plan
from .tasks import Task, by_task

__all__ = ["TaskPlan", "merge_whole_layers", "shift_weight_gradients"]

Span = tuple[int, int]


@dataclass(frozen=True)
class TaskPlan(Plan):
    """Tasks of layers on processors. A layer is a run of blocks; `starts` are the first blocks of the layers.

    `stage_costs` are the loads of the processors. The *home* of a layer is where its forward runs and its weights live.

    >>> one = Fraction(1)
    >>> tasks = [Task(*t) for t in (("F", 0, 0, one, 0), ("G", 0, 1, one, 1), ("F", 1, 1, one, 1), ("G", 1, 1, one, 1))]
    >>> plan = TaskPlan(("a", "b"), (0, 1), (1.0, 3.0), (4, 4), tasks=tuple(tasks), processors=2)
    >>> plan.homes, plan.delays, plan.posts, plan.split
    ((0, 1), (1, 0), (0, 1), None)
    """

    tasks: tuple[Task, ...] = ()
    processors: int = 1
    #: Shape of the plan, as the planner calls it.
    mode: str = ""

    @property
    def split(self) -> None:
        """Tasks are placed one by one: no list of blocks describes this plan."""
        return

    @property
    def spans(self) -> tuple[Span, ...]:
        """First block of each layer, and the block after its last."""
        return tuple(zip(self.starts, (*self.starts[1:], len(self.blocks)), strict=True))

    @property
    def homes(self) -> tuple[int, ...]:
        """The processor of each layer's forward."""
        shares = by_task(self.tasks)
        return tuple(shares["F", layer][0].processor for layer in range(len(self.starts)))

    @property
    def delays(self) -> tuple[int, ...]:
        """Per layer, micro-batches between the weights that a gradient is taken at and those that it changes."""
        shares = by_task(self.tasks)
        layers = range(len(self.starts))
        return tuple(shares["G", layer][0].slot - shares["F", layer][0].slot for layer in layers)

    @property
    def posts(self) -> tuple[int | None, ...]:
        """Addresses: the layers, by processor; a processor without a home has an address of its own (`None`)."""
        homes = self.homes
        posts: list[int | None] = []
        for processor in range(self.processors):
            posts += [layer for layer, home in enumerate(homes) if home == processor] or [None]
        return tuple(posts)

    def first_post(self, processor: int) -> int:
        """Where messages for a processor go."""
        homes = self.homes
        return sum(max(1, homes.count(lower)) for lower in range(processor))

    def post_delays(self) -> tuple[int, ...]:
        """`delays` by post."""
        delays = self.delays
        return tuple(0 if layer is None else delays[layer] for layer in self.posts)

    def rank_posts(self, ranks: Sequence[range]) -> list[range]:
        """The posts of ranks that hold these processors."""
        return [range(self.first_post(rank[0]), self.first_post(rank[-1] + 1)) for rank in ranks]

    def check(self) -> TaskPlan:
        """Raise `PlanError` unless an executor can follow this plan; return it otherwise."""
        used = {task.processor for task in self.tasks}
        empty = [p for p in range(self.processors) if p not in used]
        if empty:
            raise PlanError(
                f"{len(self.starts)} layers give {self.processors} processors too little to do: {empty} would be idle. "
                f"Ask for at most {self.processors - len(empty)} stages"
            )
        homes = self.homes
        if homes[0] != 0 or any(a > b for a, b in pairwise(homes)):
            raise PlanError(f"forwards must run on growing processors from 0 on, got {homes}: use a plan in a row")
        for (kind, layer), shares in by_task(self.tasks).items():
            if sum(share.fraction for share in shares) != 1 or (kind in "FGH" and len(shares) > 1):
                raise PlanError(f"the shares of {kind} of layer {layer} do not make one task: {shares}")
        return self

    def to_json(self) -> dict[str, Any]:
        tasks = [task._asdict() | {"fraction": str(task.fraction)} for task in self.tasks]
        return super().to_json() | {"tasks": tasks, "delays": list(self.delays)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TaskPlan:
        tasks = [
            Task(t["kind"], t["layer"], t["processor"], Fraction(str(t["fraction"])), t["slot"]) for t in data["tasks"]
        ]
        values: dict[str, Any] = {
            name: tuple(data[name]) if isinstance(data[name], list | tuple) else data[name]
            for name in cls.__dataclass_fields__
            if name in data
        }
        return cls(**values | {"tasks": tuple(tasks)})

    def __str__(self) -> str:
        unit, scale = ("ms", 1e3) if self.measured else ("relative", 1.0 / (sum(self.stage_costs) or 1.0))
        lines = []
        for processor, load in enumerate(self.stage_costs):
            mine = [self._name(task) for task in self.tasks if task.processor == processor]
            lines.append(f"processor {processor}: {' '.join(mine)}  ({load * scale:.3g} {unit})")
        for layer, (start, end) in enumerate(self.spans):
            names = self.blocks[start] if end == start + 1 else f"{self.blocks[start]} .. {self.blocks[end - 1]}"
            lines.append(f"layer {layer}: {names}, {self.parameters[layer]:,} parameters, delay {self.delays[layer]}")
        lines.append(f"balance {self.balance:.0%}" + (f"; {self.note}" if self.note else ""))
        return "\n".join(lines)

    @staticmethod
    def _name(task: Task) -> str:
        share = "" if task.fraction == 1 else f"*{plain(exact(task.fraction)):.2g}"
        return f"{task.kind}{task.layer}{share}@{task.slot}"


def merge_whole_layers(tasks: Sequence[Task], layers: int) -> tuple[list[Task], list[Span]]:
    """Make one layer of neighbours all of whose tasks are on one processor: it treats them as one anyway.

    **Returns:** the tasks of the merged layers, and which layers each of them consists of.

    >>> one = Fraction(1)
    >>> rows = [("F", 0, 0, 0), ("G", 0, 0, 2), ("D", 1, 0, 2), ("F", 1, 0, 0), ("G", 1, 0, 2), ("D", 2, 1, 1),
    ...     ("F", 2, 1, 1), ("G", 2, 1, 1)]
    >>> merged, spans = merge_whole_layers([Task(kind, l, p, one, slot) for kind, l, p, slot in rows], 3)
    >>> spans, [(task.kind, task.layer, task.slot) for task in merged]
    ([(0, 2), (2, 3)], [('F', 0, 0), ('G', 0, 2), ('D', 1, 1), ('F', 1, 1), ('G', 1, 1)])
    """
    places = [{task.processor for task in tasks if task.layer == layer} for layer in range(layers)]
    whole = [len(place) == 1 for place in places]
    spans: list[Span] = []
    for layer in range(layers):
        if layer and whole[layer] and whole[layer - 1] and places[layer] == places[layer - 1]:
            spans[-1] = (spans[-1][0], layer + 1)
        else:
            spans.append((layer, layer + 1))
    merged: list[Task] = []
    for task in tasks:
        number, (start, _) = next((n, s) for n, s in enumerate(spans) if s[0] <= task.layer < s[1])
        # Inside of a whole layer there is nothing to hand over, and it applies its own elementwise factors.
        inner = whole[task.layer] and (task.kind == "H" or task.layer > start)
        if not inner:
            merged.append(task._replace(layer=number))
    return merged, spans


def shift_weight_gradients(tasks: Sequence[Task], slots: int) -> list[Task]:
    """Let every weight gradient come later by some slots; nobody waits for it."""
    return [task._replace(slot=task.slot + slots) if task.kind == "G" else task for task in tasks]
