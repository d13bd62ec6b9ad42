"""Plan files and layer-cost files of any content: something that can be used, or a `PlanError` that names the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given

from fuzzing import altered, cases, damaged, outcome, values
from unlatch.errors import PlanError
from unlatch.plan import plan_from_json, plan_to_json, read_plan
from unlatch.plan.layer_costs import LayerCost, layer_costs_from_json, layer_costs_to_json, read_layer_costs
from unlatch.plan.layerpipe import plan_layerpipe

CHAIN = [LayerCost(f"layer{i}", 1 + i, 2, 0.5, activation_bytes=10, weight_bytes=4) for i in range(4)]
COSTS = layer_costs_to_json(CHAIN)
TASKS = {**plan_layerpipe(CHAIN, 2).to_json(), "blocks": [c.name for c in CHAIN], "starts": [0, 1, 2, 3]}
CUT = {"method": "dtr", "blocks": ["a", "b", "c"], "starts": [0, 2], "loads": [1.5, 2], "parameters": [4, 5]}
RANKING = {"method": "auto", "ranking": [{"plan": CUT}, {"plan": {**CUT, "method": "bp"}}]}


def used(plan: Any, path: Any) -> None:
    if isinstance(plan, Exception):
        assert isinstance(plan, PlanError)
        assert str(path) in str(plan)
        return
    str(plan)
    assert plan.busy_devices >= 1
    outcome(plan_from_json, json.loads(json.dumps(plan_to_json(plan))))


@pytest.mark.parametrize("plan", [CUT, TASKS, RANKING], ids=["cut", "tasks", "ranking"])
def test_plans_with_other_values(tmp_path, plan):
    path = tmp_path / "plan.json"

    @cases(150, share=0.5)
    @given(altered(plan))
    def check(tree: Any) -> None:
        path.write_text(json.dumps(tree))
        used(outcome(read_plan, path), path)

    check()


@cases(150)
@given(damaged(json.dumps(RANKING).encode(), most=5))
@example(b"[" * 100_000)
@example(b'{"method": "bp", "blocks": ' + b"[" * 5000)
@example(b"\xff")
@example(b"null")
def test_damaged_plans(tmp_path, raw):
    (tmp_path / "plan.json").write_bytes(raw)
    used(outcome(read_plan, tmp_path / "plan.json"), tmp_path / "plan.json")


@cases(300)
@given(altered(COSTS))
@example([{"name": "a", "F": 10**400, "G": 1}])
@example([{"name": "a", "F": float("nan"), "G": 1}])
@example([[]])
def test_costs_with_other_values(tree):
    found = outcome(layer_costs_from_json, tree)
    assert isinstance(found, PlanError) or layer_costs_from_json(layer_costs_to_json(found)) == found


@cases(100)
@given(values)
def test_costs_made_of_anything(tree):
    outcome(layer_costs_from_json, tree)


@cases(200)
@given(damaged(json.dumps(COSTS).encode(), most=5))
def test_damaged_costs(tmp_path, raw):
    path = tmp_path / "costs.json"
    path.write_bytes(raw)
    found = outcome(read_layer_costs, path)
    assert not isinstance(found, PlanError) or str(path) in str(found)


@cases(60, share=0.05)
@given(altered(COSTS, values.filter(lambda value: isinstance(value, int | float))))
def test_whatever_costs_are_read_can_be_planned(tree):
    costs = outcome(layer_costs_from_json, tree)
    if not isinstance(costs, PlanError):
        for devices in (1, 3):
            outcome(plan_layerpipe, costs, devices)
