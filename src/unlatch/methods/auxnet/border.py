"""What the methods have in common that treat the input of each stage as a variable of its own (AuxNet, AuxVar, SPH)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from ...errors import ConfigError
from ...plan.layer_costs import LayerCost
from ...rules.ramp import Ramp, as_ramp, check_ramp, value_at
from ...runtime.blueprint import Blueprint
from ...runtime.stage import Stage
from ...runtime.station import Station
from ...schedule import Kind, Schedule, Workload
from ..costs import stage_costs
from ..local import Local
from ..local.networks import Networks
from ..local.synthesis import SYNTHESISERS_APART
from ..options import Whole, at_least
from .mismatch import BorderRule
from .probe import GradientProbe
from .report import MEASURES, border_metrics, border_summary
from .schedule import REDUCE, UPDATE_AUXILIARY, Borders, border_schedule
from .workload import Extras, border_workload

__all__ = ["BorderMethod"]

NotNegative: TypeAlias = Annotated[int, at_least(0)]


@dataclass(frozen=True)
class BorderMethod(Local):
    """Every stage starts at once, from a predicted input, and is pulled towards what the next stage started from.

    With `x` the state that arrives at a border, `lam` the input that the stage there used, `p` the gradient on it and
    psi half their squared distance, the stage below minimises `kappa_stage <kappa, x> + beta pull psi(x, lam)`, and
    whatever makes `lam` minimises `adjoint <p, lam> - kappa_input <kappa, lam> + beta imitate psi(lam, x)`.

    **Arguments:**

    - `form`: `"penalty"` or `"lagrangian"` (augmented Lagrangian, with multipliers).
    - `beta`: penalty coefficient, multiplies `pull` and `imitate`; a number, or points `((update, value), ...)` between
      which it is interpolated.
    - `pull`, `imitate`: weights of psi for the stage below and for the predicted input. Equal in the textbook method.
    - `adjoint`: weight of the gradient of the stage above in the predicted input; 1 in the textbook method.
    - `kappa_stage`, `kappa_input`: weights of the multiplier; 1 and 1 in the textbook method.
    - `theta`: relative size of a correction of the predicted input, where it is made explicitly.
    - `units`: psi averages (`"mean"`) or sums (`"sum"`) over the elements of a sample; see `BorderRule`.
    - `border_norm`: compare channels at mean 0 and variance 1.
    - `stage_steps`: updates of a stage per correction of the predicted inputs.
    - `true_share`: share of the true state mixed into the predicted input, a number or points as for `beta`. Above 0 a
      stage waits for the one below.
    - `echo`: weight, a number or points, that the last stage gives to the true state of the batch before; the rest goes
      to the predicted input of this one. Costs a further pass of the last stage, but no message and no waiting.
    - `serial_first`: first batches trained by plain backpropagation, from which predictions learn.
    - `serial_every`, `serial_from`: further batches trained so: every n-th, or all from the n-th on.
    - `data`: `"send"` sends raw batches from rank to rank; `"build"` has every rank build the same batches from its own
      loader. Checksums are compared in both cases.
    - `ablation`: `"no-adjoint"` drops the adjoint term, `"frozen"` never updates stages before the last, `"shallow"`
      trains only the last stage on its predicted input and leaves out the stages before it.
    - `measure`: updates between two measurements at the borders.
    - `probe`: updates between two comparisons with the gradient of backpropagation, 0 for none; inline only.
    """

    form: Literal["penalty", "lagrangian"] = "penalty"
    beta: Ramp = 1.0
    pull: float = 1.0
    imitate: float = 1.0
    adjoint: float = 1.0
    kappa_stage: float = 1.0
    kappa_input: float = 1.0
    theta: float = 0.25
    units: Literal["mean", "sum"] = "mean"
    border_norm: bool = False
    stage_steps: Whole = 1
    true_share: Ramp = 0.0
    echo: Ramp = 0.0
    serial_first: NotNegative = 0
    serial_every: NotNegative = 0
    serial_from: NotNegative | None = None
    data: Literal["send", "build"] = "send"
    ablation: Literal["none", "no-adjoint", "frozen", "shallow"] = "none"
    measure: Whole = 10
    probe: NotNegative = 0

    measures = MEASURES

    def __post_init__(self) -> None:
        super().__post_init__()
        for what in ("beta", "true_share", "echo"):
            object.__setattr__(self, what, as_ramp(getattr(self, what)))
        check_ramp(f"{self.name}: beta", self.beta, 0.0, open_low=True)
        check_ramp(f"{self.name}: true_share", self.true_share, 0.0, high=1.0)
        check_ramp(f"{self.name}: echo", self.echo, 0.0, high=1.0)
        for what in ("pull", "imitate", "adjoint", "kappa_stage", "kappa_input"):
            check_ramp(f"{self.name}: {what}", getattr(self, what), 0.0)
        check_ramp(f"{self.name}: theta", self.theta, 0.0, open_low=True, high=1.0)
        whole = self.accumulate == 1 and self.microbatches in ("auto", 1)
        if not whole and (self.stage_steps > 1 or self.probe or self.echo != 0.0):
            raise ConfigError(
                f"{self.name}: stage_steps, probe and echo need one update per batch: no accumulate, microbatches=1"
            )
        self.border_rule()

    # ----------------------------------------------------------------- what runs

    #: Whether variables are stored per sample.
    stores: ClassVar[bool] = False

    @property
    def taps_one_network(self) -> bool:
        """Whether all predictions are taps of one network."""
        return False

    @property
    def fits(self) -> int:
        """How often the network is fitted to corrected variables; 0 where corrections pass through it instead."""
        return 0

    @property
    def multiplier_source(self) -> Any:
        """Where multipliers come from: a name, or a function."""
        return "none"

    @property
    def repeats_backward(self) -> bool:
        # The first makes the multiplier that the second is given.
        return bool(self.multiplier_source == "rebuild")

    def schedule(self, stages: int) -> Schedule:
        serial = self.serial_first > 0 or self.serial_every > 0 or self.serial_from is not None
        source = self.multiplier_source
        return border_schedule(
            stages,
            Borders(
                multiplier="given" if callable(source) else source,
                stores=self.stores,
                shared=self.taps_one_network,
                shallow=self.ablation == "shallow",
                builds=self.data == "build",
                echoes=self.echo != 0.0,
                probes=(lambda m: m.ends and m.update % self.probe == 0) if self.probe else None,
                is_serial=(lambda m: self.is_serial(m.batch)) if serial else None,
                mixes=(lambda m: self.share_at(m.update) > 0.0) if self.true_share != 0.0 else None,
            ),
        )

    def workload(self, layers: Sequence[LayerCost], starts: Sequence[int], data_bytes: float = 0.0) -> Workload:
        rule, source = self.border_rule(), self.multiplier_source
        # Costs do not tell shapes: borders are taken for pictures here.
        sent = 1 / rule.downsample**2
        # A multiplier goes along as a tensor of its own where the two cannot be added up.
        told = source == "replay" or (self.stores and self.form == "lagrangian")
        apart = told and (rule.normalise or rule.downsample > 1)
        return border_workload(
            stage_costs(layers, starts),
            [self.extras(layers, starts, stage) for stage in range(len(starts))],
            data_bytes=0.0 if self.data == "build" else data_bytes,
            inputs=sent + (1.0 if apart else 0.0),
            states=sent,
            frozen=self.ablation == "frozen",
            synthesiser=source == "synthesiser",
        )

    def extras(self, layers: Sequence[LayerCost], starts: Sequence[int], stage: int) -> Extras:
        """What a stage does beside forward and backward: stored inputs cost nothing to predict and to correct."""
        return Extras(repeats=self.stage_steps - 1)

    def stations(self, blueprint: Blueprint) -> Mapping[int, Station]:
        stages = {stage.index: stage for stage in self.local_stages(blueprint)}
        probe = None
        if self.probe:
            if len(stages) < blueprint.stages:
                raise ConfigError(
                    f"{self.name}: probe compares with backpropagation and needs the whole network in one process"
                )
            probe = GradientProbe(stages)
        networks = Networks(self.name, blueprint)
        networks.require_single_tensors()
        if self.border_norm:
            networks.warn_of_single_vectors()
            if self.units == "mean" and self.ablation in ("none", "no-adjoint"):
                networks.warn_of_strong_pull(self.beta_at(0) * self.pull)
        return self._stations(networks, stages, probe)

    @abstractmethod
    def _stations(
        self, networks: Networks, stages: Mapping[int, Stage], probe: GradientProbe | None
    ) -> dict[int, Station]:
        """The stations of these stages."""

    # ------------------------------------------------------------------- numbers

    def border_rule(self) -> BorderRule:
        """How the two sides of a border are compared."""
        return BorderRule(self.units, self.border_norm)

    @property
    def reads_on_every_rank(self) -> bool:
        return self.data == "build"

    @property
    def also_applies(self) -> frozenset[Kind]:  # type: ignore[override]
        """A shared network is summed over stages, and before that over replicas."""
        return frozenset({REDUCE if self.taps_one_network else UPDATE_AUXILIARY})

    @property
    def unreplicable(self) -> str | None:
        if self.stores:
            return "it stores variables of every sample, and a sample meets another replica in every epoch"
        if self.multiplier_source == "synthesiser":
            return SYNTHESISERS_APART
        if self.stage_steps > 1 or self.fits > 1:
            return "it steps several times within an update, and replicas sum gradients once for each: let it step once"
        if self.probe:
            return "its probe compares the gradient of one replica with that of whole batches: leave probe out"
        return super().unreplicable

    def probing(self, every: int) -> BorderMethod:
        """The method with its own comparison with backpropagation switched on.

        >>> from .auxnet import AuxNet
        >>> AuxNet().probing(5).probe
        5
        """
        return replace(self, probe=every)

    def measurements(self, statistics: Sequence[Any], after: int = -1) -> list[dict[str, float]]:
        return border_metrics(statistics, after)

    def summarise(self, statistics: Sequence[Any], data: float, step: float | None) -> dict[str, Any]:
        return border_summary(statistics, data, step) if len(statistics) > 1 else {}

    def beta_at(self, update: int) -> float:
        """The penalty coefficient at an update."""
        return value_at(self.beta, update)

    def share_at(self, update: int) -> float:
        """The share of the true state in the predicted input at an update."""
        return value_at(self.true_share, update)

    def echo_at(self, update: int) -> float:
        """The weight of the true state of the batch before, at the last stage."""
        return value_at(self.echo, update)

    def is_serial(self, batch: int) -> bool:
        """Whether a batch is trained by plain backpropagation.

        >>> from .auxnet import AuxNet
        >>> [AuxNet(serial_first=2, serial_every=4).is_serial(i) for i in range(5)]
        [True, True, False, True, False]
        """
        if batch < self.serial_first or (self.serial_from is not None and batch >= self.serial_from):
            return True
        return self.serial_every > 0 and batch % self.serial_every == self.serial_every - 1
