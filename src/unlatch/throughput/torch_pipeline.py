"""torch.distributed.pipelining as a rival, with the cut that our planner chooses for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn.carry import leaving_weights
from ..nn.chain import Block, chain, state_names
from ..nn.chain import cut as cut_apart
from ..nn.tree import Tree, batch_size
from ..plan import Plan, make_plan, profile
from .subject import Subject, Updates
from .systems import System, Training, Unsuitable
from .timing import WARM

__all__ = ["ORDERS", "TorchPipeline", "fused_cut"]

#: What rows call them, and torch. Zero bubble is the one-stage-per-rank case of its interleaved schedule.
ORDERS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "zero bubble": "ScheduleInterleavedZeroBubble"}


@dataclass(frozen=True)
class TorchPipeline(System):
    """One of torch's own schedules.

    **Arguments:** `order`: a key of `ORDERS`; `parts`: micro-batches; `starts`: first block of each stage, which
    `fitted` finds out.
    """

    order: str
    parts: int
    starts: tuple[int, ...] = ()

    system = "torch pipelining"

    @property
    def method(self) -> str:
        return f"{self.order} x{self.parts}"

    @property
    def cut(self) -> tuple[int, ...] | None:
        return self.starts or None

    def fitted(self, subject: Subject, ranks: int) -> System:
        starts = self.starts or tuple(fused_cut(subject, ranks).starts)
        _check(subject, starts, self.parts)
        return replace(self, starts=starts)

    def start(self, subject: Subject) -> Training | None:
        return _Running(self, subject)


def fused_cut(subject: Subject, ranks: int) -> Plan:
    """Where a pipeline with whole backwards is best cut."""
    blocks = chain(subject.model())
    if len(blocks) < ranks:
        raise Unsuitable(f"the model has {len(blocks)} blocks, too few for {ranks} ranks")
    # Of whole blocks: torch passes one tensor from stage to stage.
    if not 1 < ranks < len(blocks):
        return make_plan(blocks, ranks)
    return make_plan(blocks, ranks, costs=profile(blocks, subject.batch()[0], precision=subject.precision))


class _Running:
    warm = WARM

    def __init__(self, pipeline: TorchPipeline, subject: Subject) -> None:
        from torch.distributed.pipelining import PipelineStage, schedules

        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model = subject.model()
        parts = [_Contiguous(blocks, subject) for blocks in cut_apart(chain(self.model), pipeline.starts)]
        self.part = parts[self.rank]
        shapes = _shapes(parts[: self.rank + 1], subject, pipeline.parts)
        stage = PipelineStage(self.part, self.rank, ranks, torch.device("cpu"), *shapes)
        kind: Any = getattr(schedules, ORDERS[pipeline.order])
        several = issubclass(kind, schedules.PipelineScheduleMulti)
        self.schedule = kind([stage] if several else stage, pipeline.parts, loss_fn=subject.value)
        self.last = self.rank == ranks - 1
        self.updates = Updates(subject, self.part)
        self.feed(subject.batch())

    def feed(self, data: tuple[Tree, Tree]) -> None:
        x, self.target = data
        assert isinstance(x, Tensor)
        self.input = x.contiguous()

    def step(self) -> None:
        self.updates.clear()
        given = (self.input,) if self.rank == 0 else ()
        if self.last:
            self.schedule.step(*given, target=self.target, losses=[])
        else:
            self.schedule.step(*given)
        self.updates.apply()

    def flush(self) -> None:
        pass

    def weights(self) -> dict[str, Tensor]:
        names = state_names(self.part.part, self.model)
        own = {names[key]: tensor for key, tensor in self.part.part.state_dict().items()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        return {name: tensor for part in parts for name, tensor in part.items()}

    def close(self) -> None:
        pass


class _Contiguous(nn.Module):
    """A stage that makes what crosses its borders contiguous in both directions: gloo refuses anything else."""

    def __init__(self, blocks: list[Block], subject: Subject) -> None:
        super().__init__()
        self.part = nn.Sequential(*(block.module for block in blocks))
        self.casting = subject.casting

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda g: g.contiguous())  # type: ignore[no-untyped-call]
        with self.casting():
            out: Tensor = self.part(x).contiguous()
        return out


def _shapes(parts: Sequence[_Contiguous], subject: Subject, count: int) -> tuple[Tensor, Tensor]:
    """What goes into the last of these stages and comes out of it, of one of so many micro-batches.

    Torch would find out by a forward on memory that nobody has written, which batch norm would count.
    """
    x, _ = subject.batch()
    assert isinstance(x, Tensor)
    given, out = x, x[: len(x) // count].contiguous()
    for part in parts:
        given = out if part is parts[0] else out.detach().requires_grad_()
        part.eval()
        out = part(given)
        part.train()
    return given, out


def _check(subject: Subject, starts: tuple[int, ...], parts: int) -> None:
    """Raise `Unsuitable` unless single tensors cross the borders and micro-batches are equally large."""
    x, y = subject.batch()
    for what, tree in (("input", x), ("target", y)):
        if not isinstance(tree, Tensor):
            raise Unsuitable(f"the {what} is no single tensor, which is all that is tried with torch's pipelines")
    samples = batch_size(x)
    if samples % parts:
        raise Unsuitable(f"torch's pipelines need equal micro-batches: {samples} samples do not make {parts}")
    stages = cut_apart(chain(subject.model()), starts)
    for stage in stages[:-1]:
        tied = leaving_weights([block.module for block in stage])
        if tied:
            raise Unsuitable(f"stages share weights ({', '.join(sorted(tied))}), which torch's pipelines cannot")
    state: Tree = x[: samples // parts]
    with torch.no_grad():
        for above, stage in enumerate(stages, 1):
            state = _Contiguous(stage, subject).part(state)
            if not isinstance(state, Tensor):
                where = f"before block '{stages[above][0].name}'" if above < len(stages) else "at the end"
                raise Unsuitable(f"what the model passes on {where} is no single tensor, but {type(state).__name__}")
            if above < len(stages) and not state.is_floating_point():
                raise Unsuitable(f"{state.dtype} crosses a border, which has no gradient")
