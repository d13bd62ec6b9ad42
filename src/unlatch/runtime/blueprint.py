"""Everything that the stations of a run are built from, the same on every rank but for `world`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..nn.chain import Block, Model, StageChain, chain, cut
from ..nn.parts import in_parts
from ..nn.tree import Tree
from ..plan import Plan
from ..transport.rounding import Format
from ..transport.world import World
from .stage import StageOptions

__all__ = ["Blueprint"]


@dataclass(frozen=True)
class Blueprint:
    """A model, where it is cut, and what the user chose.

    **Arguments:**

    - `ranks`: for each device of the plan the rank that it is.
    - `microbatches`, `accumulate`: parts of a batch, and batches per update.
    - `mean_loss`: whether the loss is a mean over samples.
    - `sample`: one batch, if the user gave one.
    - `own_loss`: whether the loss is one that the model brought along.
    - `transport`: how messages travel between ranks: `"auto"`, `"gloo"` or `"nccl"`.
    - `messages`: how states and gradients travel between devices of the plan.
    - `replicas`: how many of the network are trained, on `ranks` and as many further ones each.
    """

    model: Model
    blocks: Sequence[Block]
    plan: Plan
    options: StageOptions
    ranks: Sequence[int]
    world: World
    microbatches: int
    accumulate: int
    mean_loss: bool
    sample: tuple[Tree, Tree] | None
    own_loss: bool = False
    transport: str = "auto"
    messages: Format = "exact"
    replicas: int = 1

    @property
    def stages(self) -> int:
        """Parts that the model is cut into."""
        return len(self.plan.starts)

    def modules(self) -> list[StageChain]:
        """The parts themselves; those of this process as its stages use them, on its device."""
        parts = cut(self.blocks, self.plan.starts)
        return [self.module(part) if self.is_here(i) else StageChain(part, self.model) for i, part in enumerate(parts)]

    def module(self, blocks: Sequence[Block]) -> StageChain:
        """Some blocks as a stage of this process uses them."""
        return self.options.device.own(StageChain(blocks, self.model))

    @property
    def span(self) -> int:
        """Ranks from one replica to the next: all are in one process, or each has its own ones."""
        return self.world.size // self.replicas

    def column(self, number: int) -> Blueprint | None:
        """The blueprint of one replica; `None` if no part of it is in this process.

        All but the first train copies of the model, which itself has the weights that are handed out.
        """
        ranks = [rank + number * self.span for rank in self.ranks]
        if self.world.rank not in ranks:
            return None
        if number == 0:
            return self
        model = copy.deepcopy(self.model)
        options = replace(self.options, column=number)
        blocks = in_parts(chain(model), self.plan.split or ())
        return replace(self, model=model, blocks=blocks, ranks=ranks, options=options)

    def is_here(self, device: int) -> bool:
        """Whether a device of the plan is this rank."""
        return self.ranks[device] == self.world.rank

    @property
    def alone(self) -> bool:
        """Whether all stations are in this process."""
        return len(set(self.ranks)) == 1
