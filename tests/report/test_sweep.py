"""Sweeps: numbers of devices as text, rows, CSV, curves."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from unlatch.errors import ConfigError
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import pipedream_interval, plan_layerpipe
from unlatch.plan.networks import mac_costs, network_shapes
from unlatch.report.sweep import SweepRow, draw_sweep, parse_counts, sweep, write_sweep

METHODS = ["bp", "pipedream", "layerpipe", "petra", "1f1b", "zb-h2"]
LAYERS = [LayerCost(f"l{n}", 1, 1, 1, activation_bytes=8, weight_bytes=4) for n in range(8)]


@pytest.fixture(scope="module")
def rows() -> list[SweepRow]:
    return sweep(LAYERS, [1, 2, 4, 12], METHODS)


def test_counts() -> None:
    assert parse_counts("2..64") == list(range(2, 65))
    assert parse_counts("3,1") == [3, 1]
    for wrong in ("", "two", "4..2", "0..3", "2..8*1", "2..8*-2", "1,,2"):
        with pytest.raises(ConfigError):
            parse_counts(wrong)


def test_rows(rows: list[SweepRow]) -> None:
    found = {(row.method, row.devices): row for row in rows}
    assert len(found) == len(METHODS) * 4
    for row in rows:
        assert row.speedup <= row.devices * (1 + 1e-9)
        assert row.utilisation == pytest.approx(row.speedup / row.devices)
    for method in METHODS:
        assert found[method, 1].speedup == pytest.approx(1)
        assert found[method, 1].staleness == 0
    assert found["bp", 4].speedup == pytest.approx(1)
    assert found["pipedream", 4].speedup == pytest.approx(23 / 6)
    assert found["layerpipe", 4].speedup == pytest.approx(4)
    # Eight layers make eight stages; tasks can use more.
    assert (found["pipedream", 12].stages, found["layerpipe", 12].stages) == (8, 12)
    assert found["layerpipe", 12].speedup > found["pipedream", 12].speedup
    assert found["petra", 4].memory_bytes < found["pipedream", 4].memory_bytes


def test_steady_speed_ups_are_those_of_the_planners() -> None:
    costs = mac_costs(network_shapes("vgg16"))
    straight, layerpipe = sweep(costs, [9], ["pipedream", "layerpipe"])
    assert straight.time_per_batch == pytest.approx(float(pipedream_interval(costs, 9)))
    assert layerpipe.time_per_batch == pytest.approx(float(plan_layerpipe(costs, 9).initiation_interval), rel=1e-6)
    assert straight.time_per_batch / layerpipe.time_per_batch == pytest.approx(1.5, abs=0.005)


def test_csv(rows: list[SweepRow], tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep.csv", rows)
    with (tmp_path / "sweep.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows)
    assert float(read[0]["speedup"]) == rows[0].speedup


def test_curves(rows: list[SweepRow], tmp_path: Path) -> None:
    figure = draw_sweep(rows, title="eight layers")
    left, right = figure.axes
    assert len(left.lines) == len(METHODS) + 1
    assert len(right.lines) == len(METHODS)
    figure.savefig(tmp_path / "sweep.png")
