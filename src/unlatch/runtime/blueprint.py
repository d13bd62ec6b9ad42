"""Everything that the stations of a run are built from, the same on every rank but for `world`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..nn.chain import Block, Model, StageChain, cut
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
    - `transport`: how messages travel between ranks: `"auto"` or `"gloo"`.
    - `messages`: how states and gradients travel between devices of the plan.
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

    def is_here(self, device: int) -> bool:
        """Whether a device of the plan is this rank."""
        return self.ranks[device] == self.world.rank

    @property
    def alone(self) -> bool:
        """Whether all stations are in this process."""
        return len(set(self.ranks)) == 1
