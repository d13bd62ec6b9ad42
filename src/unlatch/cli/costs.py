"""Where the costs of layers come from: a file, a published network, or the user's own model, counted or measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..nn.chain import chain
from ..plan import profile
from ..plan.layer_costs import LayerCost, from_profile, read_layer_costs
from ..plan.mac import mac_costs
from ..plan.model_costs import model_costs
from ..plan.networks import network_shapes
from ..plan.systolic import systolic_costs
from .brief import build_model, loaders, prepare
from .settings import read_settings

__all__ = ["CostSource", "layer_costs"]


@dataclass(frozen=True)
class CostSource:
    """The flags that name a source; exactly one of the first three is given."""

    costs: Path | None
    network: str | None
    conf: Path | None
    model: str | None
    batch: int
    array: int
    data_dir: str | None = None


def layer_costs(source: CostSource) -> tuple[list[LayerCost], int | None]:
    """**Returns:** the layers, and the samples per batch where the source tells."""
    given = [x for x in (source.costs, source.network, source.conf) if x is not None]
    if len(given) != 1:
        raise ConfigError(
            "which layers? Expected one of: a settings file CONF.toml, --costs FILE, --network NAME (alexnet, vgg16, "
            f"resnet50, ...), got {len(given)} of them"
        )
    if source.costs is not None:
        return read_layer_costs(source.costs), None
    if source.network is not None:
        shapes = network_shapes(source.network)
        if source.model in (None, "mac"):
            return mac_costs(shapes, batch=source.batch), source.batch
        if source.model == "systolic":
            return systolic_costs(shapes, batch=source.batch, rows=source.array, columns=source.array), source.batch
        raise ConfigError(f"--cost-model for a network is mac or systolic, got {source.model!r}")
    assert source.conf is not None
    return _own_model(source.conf, source.model or "measured", source.data_dir)


def _own_model(conf: Path, how: str, data_dir: str | None) -> tuple[list[LayerCost], int]:
    if how not in ("measured", "mac"):
        raise ConfigError(f"--cost-model for a model of one's own is measured or mac, got {how!r}")
    config, _ = read_settings(conf, [], method="bp", data_dir=data_dir, stages=1, processes=1)
    loader = loaders(config)[0]
    x = loader.batch(0, 0)[0]
    blocks = chain(build_model(config, prepare(config, loader).model_options))
    costs = model_costs(blocks, x) if how == "mac" else from_profile(profile(blocks, x))
    return costs, config.data.batch_size
