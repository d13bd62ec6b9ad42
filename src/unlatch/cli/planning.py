"""What `plan` and `simulate` share: the layers to place and the machine to place them on."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import ConfigError
from ..methods import BASELINE
from ..nn.chain import chain
from ..nn.tree import batch_size, split_batch
from ..plan import profile
from ..plan.layer_costs import LARGEST, SMALLEST, LayerCost, read_layer_costs
from ..plan.layer_groups import group_blocks, group_costs, grouped_profile, linear_of
from ..plan.model_costs import model_costs
from ..plan.networks import mac_costs, network_shapes, systolic_costs
from ..schedule.channel import FREE, Channel
from ..schedule.machine import Machine
from ..transport.memory import keep_freed_memory
from .cost_flags import CostSource
from .prepare import build_model, loaders, model_options
from .settings import read_settings

__all__ = [
    "MOST_DEVICES",
    "Layers",
    "check_devices",
    "layer_costs",
    "machine_of",
    "measured_machine",
    "writable",
]

_BATCH, _ARRAY = 64, 128
_PARTS, _UPDATES = 8, 4


class Layers(NamedTuple):
    """The layers; where the source tells, samples per batch, which layers are linear maps, what is to train them.

    `update` is what an update of all weights takes, where it was measured.
    """

    costs: list[LayerCost]
    batch: int | None = None
    linear: list[bool] | None = None
    optimizer: Optimizer | None = None
    update: float | None = None


def layer_costs(source: CostSource) -> Layers:
    """What to plan."""
    given = [x for x in (source.costs, source.network, source.conf) if x is not None]
    if len(given) != 1:
        raise ConfigError(
            "which layers? Expected one of: a settings file CONF.toml, --costs FILE, --network NAME (alexnet, vgg16, "
            f"resnet50, ...), got {len(given)} of them"
        )
    if source.network is None and source.batch is not None:
        raise ConfigError("--batch belongs to --network; files and settings have a batch of their own: leave it out")
    if source.array is not None and source.model != "systolic":
        raise ConfigError("--array belongs to --cost-model systolic: add it, or leave --array out")
    if source.costs is not None:
        if source.model is not None:
            raise ConfigError(f"--costs says what layers cost, so --cost-model {source.model} has nothing to do")
        return Layers(read_layer_costs(source.costs))
    if source.network is not None:
        return _published(source.network, source.model or "mac", source.batch or _BATCH, source.array or _ARRAY)
    assert source.conf is not None
    return _own_model(source.conf, source.model or "measured", source.data_dir)


def _published(name: str, how: str, batch: int, array: int) -> Layers:
    shapes = network_shapes(name)
    if how == "mac":
        return Layers(mac_costs(shapes, batch=batch), batch)
    if how == "systolic":
        return Layers(systolic_costs(shapes, batch=batch, rows=array, columns=array), batch)
    raise ConfigError(f"--cost-model for a network is mac or systolic, got {how!r}")


def _own_model(conf: Path, how: str, data_dir: str | None) -> Layers:
    """Layers as training forms them: blocks without weights join the layer below, tied ones are one."""
    if how not in ("measured", "mac"):
        raise ConfigError(f"--cost-model for a model of one's own is measured or mac, got {how!r}")
    # Whatever the settings say of method and stages is what the plan is to decide.
    config, _ = read_settings(conf, [], method=BASELINE, data_dir=data_dir)
    loader = loaders(config)[0]
    x = loader.batch(0, 0)[0]
    model = build_model(config, model_options(config, loader))
    blocks = chain(model)
    spans = group_blocks(blocks)
    precision = config.run.precision
    linear = [linear_of(blocks, span, precision) is not None for span in spans]
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = config.optimizer_factory()([p for _, p in named], named)
    if how == "mac":
        costs = group_costs(model_costs(blocks, x), blocks, spans)
        return Layers(costs, config.data.batch_size, linear, optimizer)
    # As ranks do, which the plan is for.
    keep_freed_memory()
    whole = grouped_profile(profile(blocks, x, precision=precision), spans)
    # Small parts of a batch cost more than their share, and how much more decides whether micro-batches pay.
    parts = min(_PARTS, batch_size(x) // 2)
    if parts > 1:
        part = grouped_profile(profile(blocks, split_batch(x, parts)[0], precision=precision), spans)
        whole = [layer.with_part(small, parts) for layer, small in zip(whole, part, strict=True)]
    return Layers(whole, config.data.batch_size, linear, optimizer, _update_seconds(optimizer))


def _update_seconds(optimizer: Optimizer) -> float:
    """What an update of all weights takes, the fastest of several."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    seconds = []
    for _ in range(_UPDATES):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


#: Beyond it a plan is a list of idle devices that no memory holds.
MOST_DEVICES = 100_000


def machine_of(
    bandwidth: float, latency: float, *, overlapped: bool = True, jitter: float = 0.0, seed: int = 0
) -> Machine:
    """The machine that flags ask for.

    >>> machine_of(100.0, 0.5).channel.time(50)
    1.0
    """
    if not (SMALLEST <= bandwidth <= LARGEST or bandwidth == math.inf):
        raise ConfigError(
            f"--bandwidth is in bytes per unit of time, from {SMALLEST:g} to {LARGEST:g} or inf, got {bandwidth}"
        )
    if not (latency == 0 or SMALLEST <= latency <= LARGEST):
        raise ConfigError(f"--latency is a time, 0 or from {SMALLEST:g} to {LARGEST:g}, got {latency}")
    if not 0 <= jitter <= 10:
        raise ConfigError(f"--jitter is a relative standard deviation from 0 to 10, got {jitter}")
    return Machine(Channel(bandwidth, latency, overlapped), jitter=jitter, seed=seed)


def measured_machine(given: Machine) -> Machine:
    """This machine: what actions and messages cost here, unless other links are asked for."""
    # Only whoever measures waits for it.
    from ..throughput import machine_costs

    found = machine_costs()
    channel = given.channel if given.channel != FREE else found.channel
    return replace(given, channel=channel, action=found.action)


def check_devices(count: int) -> int:
    """The number of devices if there can be so many.

    >>> check_devices(4)
    4
    """
    if count > MOST_DEVICES:
        raise ConfigError(f"--devices goes up to {MOST_DEVICES:,}, got {count}")
    return count


def writable(path: Path | None, flag: str, endings: tuple[str, ...] = ()) -> None:
    """Refuse, before any work is done, a path that cannot be written or a picture of unknown form.

    >>> writable(Path("absent/plan.json"), "--out")
    Traceback (most recent call last):
        ...
    unlatch.errors.ConfigError: --out absent/plan.json: there is no folder absent
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: is a folder; expected the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
    if endings and path.suffix.lower() not in endings:
        raise ConfigError(f"{flag} {path}: expected a name that ends in {' or '.join(endings)}")
