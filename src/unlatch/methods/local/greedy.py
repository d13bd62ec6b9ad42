"""Decoupled greedy learning and decoupled neural interfaces.

DGL gives each stage a classifier of its own, DNI a network that guesses the gradient. Stages form a pipeline in which
only outputs go up. One micro-batch at stage k of K, with the slot of each entry:

    L   (DNI) learn from the gradient that the next stage found           2      takes adjoint
    F   forward                                                           0      takes and gives a state
    A   the seed of the backward: local loss, or a guess                  0
    B   backward from the seed                                            0      DNI: gives the adjoint down
    Uh  (DGL) update of the head                                          0      once per update
    U   update of the stage                                               0      once per update
    O   the loss passes down, one stage per slot, so that all know it;    K-k    takes and gives the loss
        with it gradients of weights that an earlier stage has (`tied`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from ...errors import ConfigError
from ...plan.layer_costs import LayerCost
from ...rules.bundle import Rules
from ...runtime.blueprint import Blueprint
from ...runtime.stage import Stage
from ...runtime.station import Station
from ...schedule import Entry, Kind, Periodic, Port, Schedule, Workload, chain_entry
from ..base import GradientKind, Method, register
from ..costs import stage_costs
from ..options import Positive, as_function
from .networks import Networks
from .stations import ADJOINT, LEARN, LOSS, LOSS_DOWN, SEED, UPDATE_HEAD, GreedyStation, HeadStation, SynthesisStation
from .synthesis import SYNTHESISERS_APART
from .workload import greedy_workload, synthesiser_costs

__all__ = ["DGL", "DNI", "Local", "OptimizerFactory", "loss_down"]

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Local(Method):
    """Base of the methods with local losses. They need `sample=(x, y)`, to build what each stage is given."""

    # They learn from one tensor at every border.
    divides_blocks = False

    def rules(self) -> Rules:
        return Rules()

    @property
    def gradient(self) -> GradientKind:
        return "local"

    @property
    def inexact_at_rest(self) -> str | None:
        return f"{self.name} trains stages on losses of their own, not on backpropagation's gradient"

    def probing(self, every: int) -> Method | None:
        raise ConfigError(
            f"a probe compares with backpropagation, and {self.name} has no border to measure at: leave it out"
        )

    def local_stages(self, blueprint: Blueprint) -> list[Stage]:
        """The stages of this process."""
        rules, options, modules = self.rules(), blueprint.options, blueprint.modules()
        here = [stage for stage in range(blueprint.stages) if blueprint.is_here(stage)]
        return [Stage(i, blueprint.stages, modules[i], rules, options, counts_add_up=False) for i in here]


def loss_down(stages: int, offset: Callable[[int], int]) -> list[Entry]:
    """Entries that hand the loss down from the last stage, so that every process knows it."""
    entries = []
    for stage in reversed(range(stages)) if stages > 1 else ():
        takes = (Port(LOSS, stage + 1),) if stage < stages - 1 else ()
        gives = (Port(LOSS, stage - 1),) if stage else ()
        entries.append(Entry(LOSS_DOWN, stage, offset(stage), takes, gives))
    return entries


@register
@dataclass(frozen=True)
class DGL(Local):
    """Decoupled greedy learning (Belilovsky et al. 2020): each stage is trained on the loss of its own small head.

    Stages work like a pipeline in which nothing comes back, so no gradient is ever stale.

    **Arguments:**

    - `head`: a function `(border_shape, output_shape) -> nn.Module`; unless given, pooling, three 1x1 convolutions and
      a perceptron of three layers for images, a layer norm and a linear map for tokens (`unlatch.nn.heads.local_head`).
    - `head_optimizer`: factory for the heads; that of the run unless given.

    >>> DGL().lateness(3), DGL().schedule(3).depth
    ((0, 0, 0), 2)
    """

    head: Callable[[tuple[int, ...], tuple[int, ...]], nn.Module] | None = field(default=None, repr=False)
    head_optimizer: OptimizerFactory | None = field(default=None, repr=False)

    name = "dgl"
    summary = "each stage has a classifier of its own; no gradient crosses a border"
    also_applies = frozenset({UPDATE_HEAD})
    #: Whether heads are given all that a stage puts out, or its main tensor.
    heads_see_state: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, of in (("head", "(border_shape, output_shape)"), ("head_optimizer", "the parameters")):
            object.__setattr__(self, what, as_function(f"{self.name}: {what}", getattr(self, what), of))

    def schedule(self, stages: int) -> Schedule:
        entries: list[Entry] = []
        for stage in range(stages):
            entries.append(chain_entry(Kind.F, stage, stages))
            entries += [Entry(SEED, stage)] if stage < stages - 1 else []
            entries.append(Entry(Kind.B, stage))
            entries += [Entry(UPDATE_HEAD, stage, per="update")] if stage < stages - 1 else []
            entries.append(Entry(Kind.U, stage, per="update"))
        return Periodic(stages, (*entries, *loss_down(stages, lambda stage: stages - 1 - stage)))

    def workload(self, layers: Sequence[LayerCost], starts: Sequence[int], data_bytes: float = 0.0) -> Workload:
        stages = stage_costs(layers, starts)
        heads = [self.head_cost(layers, starts, stage) for stage in range(len(starts) - 1)]
        return greedy_workload(stages, [*heads, 0.0], [0.0] * len(stages))

    def head_cost(self, layers: Sequence[LayerCost], starts: Sequence[int], stage: int) -> float:
        """An estimate of one pass of a stage's head and back again: as the last layer, which does the same."""
        return float(layers[-1].work)

    def stations(self, blueprint: Blueprint) -> Mapping[int, Station]:
        networks = Networks(self.name, blueprint)

        def station(stage: Stage) -> GreedyStation:
            below, above = networks.reading(stage.index), networks.reading(stage.index + 1)
            if above is None:
                return GreedyStation(stage, below)
            make, whole = self.head_maker(stage.index, blueprint), self.heads_see_state
            head = networks.head(stage.index, make, self.head_optimizer, sees_state=whole)
            return HeadStation(stage, below, above, head, sees_state=whole)

        return {stage.index: station(stage) for stage in self.local_stages(blueprint)}

    def head_maker(self, stage: int, blueprint: Blueprint) -> Callable[..., nn.Module] | None:
        """What makes the head of a stage from the shapes at the border and at the output; `None` for the usual one."""
        return self.head


@register
@dataclass(frozen=True)
class DNI(Local):
    """Decoupled neural interfaces (Jaderberg et al. 2017): each stage guesses the gradient that will come from above.

    The guess is learned from the gradient that the next stage finds, which may rest on a guess itself. It is two
    batches old when it arrives, which is what a pipeline of one batch per stage and tick needs.

    **Arguments:**

    - `synthesiser`: a function `(border_shape, classes) -> nn.Module` with `forward(h, target)` and
      `loss(h, target, gradient)`; three layers unless given.
    - `conditioned`: whether it also sees class labels.
    - `learning_rate`: of Adam, which trains it.

    >>> DNI().schedule(4).depth
    3
    """

    synthesiser: Callable[[tuple[int, ...], int], nn.Module] | None = field(default=None, repr=False)
    conditioned: bool = True
    learning_rate: Positive = 1e-3

    name = "dni"
    summary = "each stage guesses the gradient from above"
    unreplicable = SYNTHESISERS_APART

    def __post_init__(self) -> None:
        super().__post_init__()
        made = as_function("dni: synthesiser", self.synthesiser, "(border_shape, classes)")
        object.__setattr__(self, "synthesiser", made)

    def schedule(self, stages: int) -> Schedule:
        entries = [Entry(LEARN, stage, 2, (Port(ADJOINT, stage + 1),)) for stage in range(stages - 1)]
        for stage in range(stages):
            entries.append(chain_entry(Kind.F, stage, stages))
            entries += [Entry(SEED, stage)] if stage < stages - 1 else []
            entries.append(Entry(Kind.B, stage, gives=(Port(ADJOINT, stage - 1),) if stage else ()))
            entries.append(Entry(Kind.U, stage, per="update"))
        return Periodic(stages, (*entries, *loss_down(stages, lambda stage: stages - 1 - stage)))

    def workload(self, layers: Sequence[LayerCost], starts: Sequence[int], data_bytes: float = 0.0) -> Workload:
        stages = stage_costs(layers, starts)
        guesses, lessons = zip(*map(synthesiser_costs, stages), strict=True)
        return greedy_workload(stages, guesses, lessons)

    def stations(self, blueprint: Blueprint) -> Mapping[int, Station]:
        networks = Networks(self.name, blueprint)

        def station(stage: Stage) -> GreedyStation:
            below, above = networks.reading(stage.index), networks.reading(stage.index + 1)
            if above is None:
                return SynthesisStation(stage, below)
            net = networks.synthesiser(stage.index, self.learning_rate, self.synthesiser, conditioned=self.conditioned)
            return SynthesisStation(stage, below, above, net)

        return {stage.index: station(stage) for stage in self.local_stages(blueprint)}
