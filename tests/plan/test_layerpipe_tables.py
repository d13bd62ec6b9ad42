"""The hand-worked tables: intervals, mappings, slots, delays, makespans, and the rows of the plausibility run."""

from __future__ import annotations

from fractions import Fraction

import pytest
from layerpipe_chains import MIXED, UNIT

from unlatch.methods.layerpipe.list_schedule import longest_first
from unlatch.plan.layer_costs import LayerCost, total_work
from unlatch.plan.layerpipe import PlannedTasks, pipedream_interval, plan_layerpipe
from unlatch.plan.networks import mac_costs, network_shapes
from unlatch.plan.pipedream import plan_straight
from unlatch.plan.tasks import chain_items

# devices: PipeDream, LayerPipe with D divisible, LayerPipe with D atomic
UNIT_INTERVALS = {
    1: ("11", "11", "11"),
    2: ("6", "11/2", "6"),
    3: ("5", "4", "4"),
    4: ("3", "11/4", "3"),
    5: ("3", "5/2", "3"),
    6: ("3", "2", "2"),
    8: ("3", "3/2", "2"),
    11: ("3", "1", "1"),
}
MIXED_INTERVALS = {
    1: ("29", "29", "29"),
    2: ("20", "16", "16"),
    3: ("12", "10", "12"),
    4: ("12", "8", "8"),
    5: ("12", "13/2", "7"),
    6: ("12", "6", "6"),
    8: ("12", "4", "4"),
    11: ("12", "4", "4"),
}


@pytest.mark.parametrize(("chain", "table"), [(UNIT, UNIT_INTERVALS), (MIXED, MIXED_INTERVALS)])
def test_intervals(chain: list[LayerCost], table: dict[int, tuple[str, str, str]]) -> None:
    for devices, row in table.items():
        found = (
            pipedream_interval(chain, devices),
            plan_layerpipe(chain, devices, "divisible").initiation_interval,
            plan_layerpipe(chain, devices, "atomic").initiation_interval,
        )
        assert found == tuple(map(Fraction, row)), devices
        # A factor of no cost leaves a D that is one piece.
        assert plan_layerpipe(chain, devices, "factor").initiation_interval == found[2]
        assert plan_straight(chain, devices).initiation_interval == found[0]


def test_total_work() -> None:
    assert (total_work(UNIT), total_work(MIXED)) == (11, 29)


def rows(plan: PlannedTasks) -> list[list[str]]:
    """What each device does; layers from 1, the share of a D in front of it."""
    found: list[list[str]] = [[] for _ in range(plan.devices)]
    for task in plan.tasks:
        share = "" if task.fraction == 1 else f"{task.fraction} "
        found[task.device].append(f"{share}{task.kind}{task.layer + 1}")
    return [sorted(row) for row in found]


def slots(plan: PlannedTasks) -> dict[str, int]:
    """Slot of each task; a D on two devices is told apart by its device (from 1)."""
    shared = {task.layer for task in plan.tasks if task.fraction < 1}
    return {
        f"{task.kind}{task.layer + 1}"
        + (f"(P{task.device + 1})" if task.kind == "D" and task.layer in shared else ""): task.slot
        for task in plan.tasks
    }


def test_two_processors() -> None:
    plan = plan_layerpipe(UNIT, 2)
    assert rows(plan) == [["1/2 D3", "D2", "F1", "F2", "G1", "G2"], ["1/2 D3", "D4", "F3", "F4", "G3", "G4"]]
    early = dict.fromkeys(("F1", "F2"), 0) | dict.fromkeys(("F3", "F4", "D4", "G4", "G3", "D3(P2)"), 1)
    assert slots(plan) == early | dict.fromkeys(("D3(P1)", "D2", "G2", "G1"), 2)
    assert plan.delays.gradient == (2, 2, 0, 0)
    assert plan.utilisation == 1


def test_three_processors() -> None:
    plan = plan_layerpipe(UNIT, 3)
    assert rows(plan) == [["D2", "F1", "F2", "G1"], ["D3", "F3", "G2", "G3"], ["D4", "F4", "G4"]]
    assert slots(plan) == (
        {"F1": 0, "F2": 0, "F3": 1, "F4": 2, "D4": 2, "G4": 2} | {"D3": 3, "G3": 3, "G2": 3, "D2": 4, "G1": 4}
    )
    assert plan.delays.gradient == (4, 3, 2, 0)
    assert plan.loads == (4, 4, 3)
    assert plan.utilisation == Fraction(11, 12)
    straight = plan_straight(UNIT, 3)
    assert (straight.loads, straight.utilisation) == ((5, 3, 3), Fraction(11, 15))


def test_four_processors() -> None:
    plan = plan_layerpipe(UNIT, 4)
    assert rows(plan) == [
        ["3/4 D2", "F1", "G1"],
        ["1/2 D3", "1/4 D2", "F2", "G2"],
        ["1/2 D3", "1/4 D4", "F3", "G3"],
        ["3/4 D4", "F4", "G4"],
    ]
    assert slots(plan) == (
        {"F1": 0, "F2": 1, "F3": 2, "F4": 3, "G4": 3, "G3": 4, "G2": 5, "G1": 6}
        | {"D4(P4)": 3, "D4(P3)": 4, "D3(P3)": 4, "D3(P2)": 5, "D2(P2)": 5, "D2(P1)": 6}
    )
    assert plan.delays.gradient == (6, 4, 2, 0)
    assert plan.delays.weight_stash == (0, 5, 3, 1)
    assert plan.utilisation == 1
    assert (plan_straight(UNIT, 4).loads, plan_straight(UNIT, 4).utilisation) == ((2, 3, 3, 3), Fraction(11, 12))


def test_six_processors_with_whole_tasks() -> None:
    plan = plan_layerpipe(UNIT, 6, "atomic")
    assert rows(plan) == [["F1", "G1"], ["D2", "F2"], ["D3", "G2"], ["F3", "G3"], ["D4", "F4"], ["G4"]]
    assert plan.delays.gradient == (6, 3, 2, 1)


@pytest.mark.parametrize("layers", [2, 3, 4, 7])
def test_one_processor_per_layer_in_closed_form(layers: int) -> None:
    plan = plan_layerpipe([LayerCost("", 1, 1, 1)] * layers, layers)
    assert plan.initiation_interval == 3 - Fraction(1, layers)
    kept = {t.layer: t.fraction for t in plan.tasks if t.kind == "D" and t.device == t.layer}
    assert kept == {layer: Fraction(layer, layers) for layer in range(1, layers)}
    assert plan.delays.gradient == tuple(2 * (layers - 1 - layer) for layer in range(layers))


def test_makespans_break_even_with_pipedream() -> None:
    assert [plan_layerpipe(UNIT, p).makespan(n) for p, n in ((2, 12), (3, 14), (4, 34))] == [77, 72, 110]
    assert [plan_layerpipe(UNIT, p).depth for p in (2, 3, 4)] == [2, 4, 6]


VGG16_MMAC = [86.7, 1849.7, 924.8, 1849.7, 924.8, 1849.7, 1849.7, 924.8, 1849.7, 1849.7]
VGG16_MMAC += [462.4, 462.4, 462.4, 102.8, 16.8, 4.1]


def test_multiply_accumulates() -> None:
    shapes = network_shapes("vgg16")
    assert [round(shape.macs / 1e6, 1) for shape in shapes] == VGG16_MMAC
    assert round(sum(shape.macs for shape in shapes) / 1e9, 3) == 15.470
    assert round(total_work(mac_costs(shapes)) / 1e9, 3) == 46.324
    alexnet = [round(shape.macs / 1e6, 1) for shape in network_shapes("alexnet")]
    assert alexnet == [105.4, 223.9, 149.5, 112.1, 74.8, 37.7, 16.8, 4.1]


# Speed-ups over the straight pipeline for P = 2..12.
PLAUSIBLE = {
    "vgg16": [1.03, 1.06, 1.15, 1.19, 1.22, 1.13, 1.30, 1.50, 1.12, 1.20, 1.20],
    "vgg19": [1.05, 1.09, 1.11, 1.14, 1.12, 1.28, 1.43, 1.13, 1.29, 1.50, 1.13],
    "resnet18": [1.04, 1.06, 1.17, 1.11, 1.12, 1.07, 1.25, 1.15, 1.20, 1.41, 1.50],
    "resnet34": [1.00, 1.01, 1.04, 1.03, 1.03, 1.11, 1.13, 1.14, 1.09, 1.04, 1.12],
    "resnet50": [1.00, 1.02, 1.02, 1.07, 1.08, 1.05, 1.06, 1.10, 1.09, 1.04, 1.10],
    "alexnet": [1.14, 1.25, 1.31, 1.50, 1.91, 2.04, 2.06, 2.57, 2.77, 3.0, 3.0],
}


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_plausible_speed_ups(name: str) -> None:
    options = {"projections": False, "early_stride": True} if name.startswith("resnet") else {}
    costs = mac_costs(network_shapes(name, **options))
    found = [
        float(pipedream_interval(costs, p) / Fraction(plan_layerpipe(costs, p).initiation_interval))
        for p in range(2, 13)
    ]
    assert found == pytest.approx(PLAUSIBLE[name], abs=0.0051)


def test_vgg16_utilisation_and_packing() -> None:
    costs = mac_costs(network_shapes("vgg16"))
    for devices, straight, layerpipe in ((8, 0.70, 0.91), (9, 0.62, 0.93)):
        assert float(plan_straight(costs, devices).utilisation) == pytest.approx(straight, abs=0.0051)
        assert float(plan_layerpipe(costs, devices).utilisation) == pytest.approx(layerpipe, abs=0.0051)
    sizes = [item.size for item in chain_items(costs, "atomic")]
    gains = []
    for devices in range(2, 17):
        loads = [Fraction(0)] * devices
        for size, home in zip(sizes, longest_first(sizes, devices), strict=True):
            loads[home] += size
        gains.append(float(pipedream_interval(costs, devices) / max(loads)))
    assert (round(gains[7], 2), round(sum(gains) / len(gains), 2)) == (1.60, 1.32)
    assert round(float(pipedream_interval(costs, 9) / (sum(sizes) / 9)), 2) == 1.62
