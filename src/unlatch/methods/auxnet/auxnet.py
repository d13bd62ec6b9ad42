"""AuxNet: a small network per stage predicts that stage's input from the raw data, so that all stages start at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from ...errors import ConfigError
from ...nn.auxiliary import Border
from ...nn.chain import Block
from ...nn.chain_check import ties
from ...nn.tree import Tree
from ...plan import BlockCost
from ...plan.layer_costs import LayerCost
from ...runtime.stage import Stage
from ...runtime.station import Station
from ..base import register
from ..local import OptimizerFactory
from ..local.networks import Networks
from ..options import Positive, Whole, as_function
from .border import BorderMethod
from .partition import auxnet_split, auxnet_starts, prediction_costs
from .probe import GradientProbe
from .sources import AuxNetSource, SharedAuxNetSource, Source
from .station import BorderStation
from .workload import Extras, auxnet_cost

__all__ = ["AuxNet"]

#: Beyond this product of layers, layers and stages the best cut takes too long to find.
_MOST_CUTS = 2_000_000

MULTIPLIERS = ("none", "replay", "synthesiser", "rebuild")


@register
@dataclass(frozen=True)
class AuxNet(BorderMethod):
    """Layer-parallel training with auxiliary-variable networks (arXiv 2112.05387), reconstructed from its derivation.

    Forward, backward and update locks are open, nothing is delayed, data may be augmented, and only two tensors cross a
    border per batch, the predicted input and the state, both beside the computation. `BorderMethod` explains the
    weights; the defaults here are those that a study on CIFAR-10 found to work.

    **Arguments** (besides those of `BorderMethod`):

    - `multiplier`: where the multipliers of the augmented Lagrangian come from, for data that is never seen twice:
      `"replay"` (each stage handles a batch one step after the next stage did, and is given the gradient found there),
      `"synthesiser"` (a network guesses it from state and label), `"rebuild"` (a first backward without multipliers
      gives those of a second one), or a function `(border, x, y) -> Tensor`. By default `"none"` for the penalty form
      and `"replay"` for the Lagrangian.
    - `correction`: `"chain-rule"` lets the gradient of the Lagrangian pass through the AuxNet; `"explicit"` corrects
      the auxiliary variables first and then fits the AuxNet to them. One plain SGD step of both is the same.
    - `aux_steps`: fits per correction, explicit only.
    - `depth`: blocks of an automatic AuxNet per run of blocks of one shape.
    - `shared`: one coarse network with a tap per border, the same on all ranks, instead of one network per border.
    - `factory`: a function of `unlatch.nn.auxiliary.Border` that builds the AuxNet of a border; in settings files
      `"package.module:function"`.
    - `aux_optimizer`: factory for the AuxNets; that of the run unless given.
    - `synthesiser_lr`: learning rate of Adam for the synthesiser.

    >>> AuxNet(form="lagrangian").multiplier
    'replay'
    >>> AuxNet(beta=0.0)
    Traceback (most recent call last):
    ...
    unlatch.errors.ConfigError: auxnet: beta must be above 0, got 0.0
    """

    pull: float = 30.0
    imitate: float = 0.05
    kappa_input: float = 0.0
    border_norm: bool = True
    multiplier: str | Callable[[int, Any, Any], Any] | None = None
    correction: Literal["chain-rule", "explicit"] = "chain-rule"
    aux_steps: Whole = 1
    depth: Whole = 1
    shared: bool = False
    factory: Callable[[Border], nn.Module] | None = field(default=None, repr=False)
    aux_optimizer: OptimizerFactory | None = field(default=None, repr=False)
    synthesiser_lr: Positive = 1e-3

    name = "auxnet"
    summary = "all stages at once, from predicted inputs; penalty or augmented Lagrangian at the borders"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.multiplier is None:
            object.__setattr__(self, "multiplier", "none" if self.form == "penalty" else "replay")
        if not callable(self.multiplier) and self.multiplier not in MULTIPLIERS:
            raise ConfigError(
                f"auxnet: multiplier must be one of {', '.join(MULTIPLIERS)} or a function, got {self.multiplier!r}"
            )
        if (self.form == "penalty") != (self.multiplier == "none"):
            raise ConfigError(
                f'auxnet: form "{self.form}" does not go with multiplier {self.multiplier!r}: the penalty has none, '
                "the Lagrangian needs one"
            )
        for what, of in (("factory", "a Border (unlatch.nn.auxiliary.Border)"), ("aux_optimizer", "the parameters")):
            object.__setattr__(self, what, as_function(f"auxnet: {what}", getattr(self, what), of))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.aux_steps > 1 and self.correction != "explicit":
            raise ConfigError(
                'auxnet: several aux_steps need correction="explicit", where there is something to fit to'
            )
        if self.correction == "explicit" and self.imitate == 0:
            raise ConfigError(
                "auxnet: an explicit correction has a step of theta / (beta imitate): imitate must be above 0"
            )
        if self.shared and (self.factory is not None or self.correction == "explicit"):
            raise ConfigError(
                'auxnet: a shared network is built automatically and trained with correction="chain-rule"'
            )
        if self.multiplier == "replay" and (self.true_share != 0.0 or self.shared):
            raise ConfigError(
                "auxnet: with replay neighbouring stages handle different batches, so that there is no true "
                "state to mix in (true_share) and no common gradient of a shared network"
            )
        if self.multiplier == "synthesiser" and self.kappa_input:
            raise ConfigError("auxnet: guessed multipliers are known only to the stage below: kappa_input must be 0")
        whole = self.accumulate == 1 and self.microbatches in ("auto", 1)
        between = self.serial_every > 0 or self.serial_from is not None or self.serial_first % self.accumulate
        if not whole and between and self.multiplier == "replay":
            raise ConfigError(
                "auxnet: with replay a stage handles a batch later than it trains a serial one, so that an update of "
                "several (micro-)batches would mix both: leave out serial_every and serial_from, let serial_first end "
                "with an update, or use one update per batch without micro-batches"
            )
        if not whole and (self.multiplier == "rebuild" or self.aux_steps > 1 or self.shared):
            raise ConfigError(
                'auxnet: multiplier="rebuild", aux_steps and shared need one update per batch: no accumulate, '
                "microbatches=1"
            )

    def balanced_split(
        self, blocks: Sequence[Block], x: Tree, stages: int, costs: Sequence[BlockCost]
    ) -> Literal["auto"] | Sequence[str]:
        # A stage pays for the network that predicts its input as well.
        return "auto" if ties(blocks) else auxnet_split(blocks, x, stages, self.depth, costs)

    def cuts(self, layers: Sequence[LayerCost], stages: int) -> list[list[int]]:
        found = super().cuts(layers, stages)
        if len(layers) ** 2 * stages <= _MOST_CUTS:
            work, shapes = [float(layer.work) for layer in layers], [layer.activation_bytes for layer in layers]
            found.append(auxnet_starts(work, prediction_costs(work, shapes, self.depth), stages))
        return found

    def extras(self, layers: Sequence[LayerCost], starts: Sequence[int], stage: int) -> Extras:
        found = super().extras(layers, starts, stage)
        if stage == 0:
            return found
        net = auxnet_cost(layers, starts[stage], self.depth)
        forward, backward, fits = float(net.F), float(net.backward), max(1, self.fits)
        # Under replay the prediction is made again when it is corrected, at the newest weights.
        passes = fits if self.multiplier == "replay" else fits - 1
        return found._replace(
            predict=forward,
            correct=fits * backward + passes * forward,
            distil=forward + backward,
            shared_bytes=float(net.weight_bytes),
        )

    def notes(self, measured: Sequence[Any]) -> list[str]:
        sizes = [(part.stage, part.capacity) for part in measured]
        return [f"the AuxNet of stage {stage} has {size}" for stage, size in sizes if size is not None]

    @property
    def multiplier_source(self) -> Any:
        return self.multiplier

    @property
    def taps_one_network(self) -> bool:
        return self.shared

    @property
    def fits(self) -> int:
        return self.aux_steps if self.correction == "explicit" else 0

    def _stations(
        self, networks: Networks, stages: Mapping[int, Stage], probe: GradientProbe | None
    ) -> dict[int, Station]:
        blueprint = networks.blueprint

        def source(stage: Stage) -> Source | None:
            if stage.first:
                return None
            net, size = networks.auxnet(
                stage.index,
                self.factory,
                self.aux_optimizer,
                depth=self.depth,
                shared=self.shared,
                rescale=self.border_norm,
            )
            kind = SharedAuxNetSource if self.shared else AuxNetSource
            return kind(self, net, stage.index, blueprint.options, size)

        def station(stage: Stage) -> Station:
            guesses = self.multiplier == "synthesiser" and not stage.last
            synthesis = networks.synthesiser(stage.index, self.synthesiser_lr) if guesses else None
            return BorderStation(stage, self, source(stage), synthesis, probe, alone=blueprint.alone)

        return {index: station(stage) for index, stage in stages.items()}
