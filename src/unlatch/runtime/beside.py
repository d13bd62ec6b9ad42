"""What stations train or store beside the network, to a checkpoint and back."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..nn.tree import copied, flatten, unflatten
from .station import Station

__all__ = ["beside_settings", "beside_tensors", "load_beside"]

log = logging.getLogger("unlatch")


def beside_tensors(stations: Iterable[Station]) -> dict[str, Tensor]:
    """What is trained or stored beside the network, under `stage<k>/...`."""
    found: dict[str, Tensor] = {}
    for station in stations:
        for name, trained in station.trained().items():
            tensors = flatten(trained.state())[0]
            found |= {f"stage{station.index}/{name}/{number}": t for number, t in enumerate(tensors)}
        found |= {f"stage{station.index}/table/{key}": t for key, t in station.stored().items()}
    return found


def beside_settings(stations: Iterable[Station], layout: Sequence[int]) -> dict[str, Any]:
    """How the same is put together again, and the cut that it belongs to."""
    settings: dict[str, Any] = {
        f"stage{station.index}/{name}": flatten(trained.state())[1]
        for station in stations
        for name, trained in station.trained().items()
    }
    return {"layout": list(layout), **settings}


def load_beside(
    stations: Iterable[Station], layout: Sequence[int], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> None:
    """Take over what a checkpoint of the same method and cut has; leave fresh what it does not.

    All ranks decide alike, so that copies stay in step and all agree on which samples are stored.
    """
    if tensors and settings.get("layout") != list(layout):
        log.warning(
            "the checkpoint is of a run cut at blocks %s, this one is cut at %s: what is trained beside the "
            "network (AuxNets, heads, stored variables) begins anew",
            settings.get("layout"),
            list(layout),
        )
        tensors = {}
    for station in stations:
        for name, trained in station.trained().items():
            own = _below(tensors, f"stage{station.index}/{name}/")
            if not own:
                continue
            state = unflatten(settings[f"stage{station.index}/{name}"], [own[str(n)] for n in range(len(own))])
            if trained.fits(state):
                trained.load(copied(state))
            else:
                log.warning(
                    "the %s of stage %d in the checkpoint is another network than the one of this run, which begins "
                    "anew",
                    name,
                    station.index,
                )
        station.load_stored(_below(tensors, f"stage{station.index}/table/"))


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
