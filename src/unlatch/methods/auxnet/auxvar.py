"""The predecessors of AuxNet: the predicted inputs are stored for every sample, which rules out augmentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from ...runtime.stage import Stage
from ...runtime.station import Station
from ..base import register
from ..local.networks import Networks
from ..options import Whole
from .border import BorderMethod
from .mismatch import BorderRule
from .probe import GradientProbe
from .station import TableStation
from .tables import Roster, TableSource

__all__ = ["SPH", "AuxVar"]


@register
@dataclass(frozen=True)
class AuxVar(BorderMethod):
    """Auxiliary variables per sample and border (reconstruction of the penalty and Lagrangian methods of 2020).

    A sample is recognised by its content. One that has not been seen is sent through the network once to begin with.

    **Arguments** (besides those of `BorderMethod`):

    - `capacity`: samples that may be stored; more than that means that the data changes from epoch to epoch.

    >>> AuxVar(form="lagrangian").theta
    0.25
    """

    capacity: Whole = 100_000

    name = "auxvar"
    summary = "stored auxiliary variables per sample; no augmentation"
    stores = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.imitate == 0 or self.ablation == "shallow":
            raise ConfigError(f'{self.name}: stored variables need imitate above 0, and know no "shallow" ablation')
        if self.true_share != 0.0:
            raise ConfigError(
                f"{self.name}: true_share is for predicted inputs, stored ones are corrected towards the state"
            )

    def _stations(
        self, networks: Networks, stages: Mapping[int, Stage], probe: GradientProbe | None
    ) -> dict[int, Station]:
        def station(stage: Stage) -> Station:
            roster = Roster(self.capacity)
            source = None if stage.first else TableSource(self, stage.index, roster)
            return TableStation(stage, self, source, roster, probe, alone=networks.blueprint.alone)

        return {index: station(stage) for index, stage in stages.items()}


@register
@dataclass(frozen=True)
class SPH(AuxVar):
    """Serial-parallel hybrid: stored variables, every few batches plain backpropagation that refreshes them, and
    filters that send averages over squares of pixels instead of whole maps.

    **Arguments:** `downsample`: side of the squares; 1 sends everything.

    >>> SPH().serial_every, SPH().border_rule().downsample
    (5, 2)
    """

    serial_every: int = 5
    downsample: Whole = 2

    name = "sph"
    summary = "auxvar with regular serial batches and down-sampled borders"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "lagrangian" and self.downsample > 1:
            raise ConfigError("sph: a multiplier needs the whole border: downsample=1, or the penalty form")

    def border_rule(self) -> BorderRule:
        return BorderRule(self.units, self.border_norm, self.downsample)
