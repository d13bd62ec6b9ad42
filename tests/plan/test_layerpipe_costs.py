"""Costs: the file format and its errors, the two cycle models, shapes of networks, counting on the meta device."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from unlatch.errors import ConfigError, PlanError
from unlatch.models.registry import build
from unlatch.nn.chain import chain
from unlatch.plan.layer_costs import LayerCost, layer_costs_from_json, read_layer_costs, write_layer_costs
from unlatch.plan.layer_groups import group_blocks, grouped_profile
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.plan.model_costs import model_costs
from unlatch.plan.networks import LayerShape, mac_costs, network_names, network_shapes, systolic_costs
from unlatch.plan.profile import profile


def test_a_file_and_back(tmp_path: Path) -> None:
    costs = [LayerCost("a", 1, 0, 2, 3, 4), LayerCost("b", 1.5, 2, 0.25, 5, 6, hadamard=0.5, kept_bytes=7)]
    write_layer_costs(tmp_path / "costs.json", costs)
    assert read_layer_costs(tmp_path / "costs.json") == costs


def test_the_first_input_gradient_is_ignored() -> None:
    with_it = layer_costs_from_json([{"name": "a", "F": 1, "D": 99, "G": 1}])
    assert with_it == layer_costs_from_json([{"name": "a", "F": 1, "G": 1}])
    assert with_it[0].D == 0


GOOD = {"name": "a", "F": 1, "D": 1, "G": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "expected a list of layers"),
        ([], "an empty list"),
        ([3], "layer 0: expected an object"),
        ([GOOD, {"name": "b", "F": 1, "G": 1}], r"layer 1 \('b'\): D missing"),
        ([{**GOOD, "weights": 1}], "unknown key 'weights'"),
        ([{**GOOD, "activation_byte": 1}], "Did you mean 'activation_bytes'"),
        ([{**GOOD, "F": "1"}], "F must be a number, got '1'"),
        ([{**GOOD, "G": True}], "G must be a number, got True"),
        ([{**GOOD, "F": -1}], "F must be finite and not negative, got -1"),
        ([{**GOOD, "G": float("nan")}], "G must be finite"),
        ([{**GOOD, "name": 3}], "name must be a text"),
        ([{"name": "a", "F": 0, "D": 5, "G": 0}], "all costs are zero"),
        ([GOOD, {**GOOD, "hadamard": 2}], "hadamard is a part of D"),
    ],
)
def test_bad_files_are_named(data: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layer_costs_from_json(data)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        read_layer_costs(tmp_path / "missing.json")
    (tmp_path / "bad.json").write_text('[{"name": "a",]')
    with pytest.raises(PlanError, match="is not JSON"):
        read_layer_costs(tmp_path / "bad.json")


def test_mac_cycles_round_up() -> None:
    shapes = [LayerShape("a", 3, 8, kernel=3, size_in=4, size_out=4), LayerShape("b", 128, 10)]
    costs = mac_costs(shapes, batch=2, elements=100)
    assert [(c.F, c.D, c.G) for c in costs] == [(70, 0, 70), (26, 26, 26)]
    assert costs[1].weight_bytes == 128 * 10 * 4


def test_systolic_cycles() -> None:
    """By hand: 16 x 16 array, tile cost 46 + T."""
    shape = LayerShape("conv", 32, 64, kernel=3, size_in=8, size_out=4)
    first, second = systolic_costs([shape, shape], batch=2, rows=16, columns=16)
    assert first.D == 0
    assert second.F == 18 * 4 * (46 + 32)
    assert second.D == 36 * 2 * (46 + 128)
    assert second.G == 4 * 18 * (46 + 32)
    grouped = systolic_costs([LayerShape("g", 32, 64, kernel=3, size_in=4, size_out=4, groups=2)], rows=16, columns=16)
    assert grouped[0].F == 2 * 9 * 2 * (46 + 16)


@pytest.mark.parametrize(
    ("name", "layers", "giga", "million"),
    [
        ("alexnet", 8, 0.724, 60.95),
        ("vgg16", 16, 15.470, 138.34),
        ("vgg19", 19, 19.632, 143.65),
        ("resnet18", 21, 1.814, 11.68),
        ("resnet34", 37, 3.664, 21.78),
        ("resnet50", 54, 4.089, 25.50),
        ("resnet101", 105, 7.801, 44.44),
        ("resnet152", 156, 11.514, 60.04),
    ],
)
def test_networks(name: str, layers: int, giga: float, million: float) -> None:
    shapes = network_shapes(name)
    assert len(shapes) == layers
    assert sum(s.macs for s in shapes) / 1e9 == pytest.approx(giga, abs=5e-4)
    assert sum(s.weights for s in shapes) / 1e6 == pytest.approx(million, abs=6e-3)
    for below, above in pairwise(shapes):
        assert below.sent >= above.channels_in * above.size_in**2, (below, above)
    assert name in network_names()


def test_unknown_networks_and_options() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'vgg16'"):
        network_shapes("vgg-16")
    with pytest.raises(ConfigError, match="projections"):
        network_shapes("resnet50", projection=False)


@pytest.mark.parametrize("name", ["resnet18", "vgg16"])
def test_models_count_as_their_tables(name: str) -> None:
    with torch.device("meta"):
        model = build(name, classes=1000, **({"stem": "imagenet"} if name == "resnet18" else {"head": "imagenet"}))
    counted = model_costs(chain(model), torch.empty(1, 3, 224, 224, device="meta"))
    table = mac_costs(network_shapes(name))
    for field in ("F", "D", "G"):
        assert sum(getattr(c, field) for c in counted) == sum(getattr(c, field) for c in table)


def test_counting_changes_nothing_and_follows_trees() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, 2 * x

    class Multiply(nn.Module):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return pair[0] @ pair[1].T

    model = nn.Sequential(nn.Linear(4, 4), Twice(), Multiply())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    costs = model_costs(chain(model), torch.randn(8, 4))
    assert [(c.F, c.D, c.G) for c in costs] == [(128, 0, 128), (0, 0, 0), (256, 512, 0)]
    assert [c.activation_bytes for c in costs] == [128, 256, 256]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_cannot_be_counted_is_named() -> None:
    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(PlanError, match=r"block 0 \('0'\) cannot be counted.*profile"):
        model_costs(chain(nn.Sequential(Looks())), torch.ones(2))


def test_measured_costs_can_be_planned() -> None:
    blocks = chain([nn.Linear(16, 16) for _ in range(3)])
    found = profile(blocks, torch.randn(8, 16), repeats=1)
    plan = plan_layerpipe(grouped_profile(found, group_blocks(blocks)), 2)
    assert isinstance(plan.initiation_interval, float)
    json.dumps(plan.to_json())
