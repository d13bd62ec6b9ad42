"""LayerPipe: the two gradients of a layer as separate work, placed on processors so that all are equally busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from ..errors import ConfigError
from ..plan.layer_costs import LayerCost
from ..rules.bundle import Rules
from ..schedule import Schedule, ticked
from ..schedule.split_rounds import split_rounds
from .base import Delayed, register
from .layerpipe_planner import LayerPipePlanner
from .options import AtLeast

__all__ = ["LayerPipe"]


@register
@dataclass(frozen=True)
class LayerPipe(Delayed):
    """GradientKind pipelining (Unnikrishnan and Parhi 2021, 2025), reconstructed from the published abstracts.

    **Arguments:**

    - `mode`: what is placed. `"stages"` is LayerPipe2: whole layers in stages, one hop per tick, delay 2S with S stages
      above. The others place forward (F), input gradient (D) and weight gradient (G) of every layer by themselves;
      then `stages` of `parallelize` counts processors. `"divisible"`: a D may be shared by neighbours, split over the
      rows of the batch. `"atomic"`: it may not. `"factor"`: its elementwise factor goes to the layer below.
    - `weights`: of the backward: a `"stash"` of the forward's, the `"latest"`, or a moving-`"average"` reconstruction
      of the forward's.
    - `g`: slots by which every weight gradient comes later than its delay demands.
    - `halves`: compute input and weight gradients one after the other in mode `"stages"` (`g` > 0 implies it).
    - `costs`: of the layers, instead of a measurement: a costs file (as for `unlatch plan --costs`) or what it holds.
    - `delays`: per stage, set from the plan by `parallelize`.

    >>> LayerPipe(mode="stages", g=1).gaps(3)
    (5, 3, 1)
    """

    mode: Literal["divisible", "atomic", "factor", "stages"] = "divisible"
    weights: Literal["stash", "latest", "average"] = "stash"
    g: Annotated[int, AtLeast(0)] = 0
    halves: bool = False
    costs: str | tuple[LayerCost, ...] | None = None
    delays: tuple[int, ...] = ()

    name = "layerpipe"
    summary = "F, D and G of each layer placed by themselves, delay 2(K-k) or as planned"
    planner = LayerPipePlanner()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.places_tasks and self.beta != 1.0:
            raise ConfigError(f'layerpipe: beta acts between stages, so it needs mode="stages": got beta={self.beta}')
        object.__setattr__(self, "delays", tuple(self.delays))

    @property
    def places_tasks(self) -> bool:
        """Whether tasks are placed, not stages."""
        return self.mode != "stages"

    def schedule(self, stages: int) -> Schedule:
        """The order of stages; where tasks are placed, that of the stages with the same number of hops."""
        return split_rounds(ticked(stages), self.g) if self.g or self.halves else ticked(stages)

    def rules(self) -> Rules:
        return self._rules(activations="graph", weights=self.weights)

    def gaps(self, stages: int) -> tuple[int, ...]:
        return self.delays or super().gaps(stages)
