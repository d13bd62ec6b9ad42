"""Plans: who decides where to cut, what a plan says, and what is refused."""

from __future__ import annotations

import json
import pickle

import pytest
from torch import nn

from unlatch.errors import PlanError
from unlatch.nn import Block, chain
from unlatch.plan import BlockCost, make_plan, plan_from_json, plan_to_json


def cost(name: str, forward: float, backward: float, nbytes: int = 8) -> BlockCost:
    return BlockCost(name, forward, backward / 2, backward / 2, nbytes, 0, 0)


def identities(count: int) -> list[Block]:
    return chain([nn.Identity() for _ in range(count)])


def test_recomputation_moves_the_cut() -> None:
    blocks = identities(7)
    costs = [cost(block.name, 1.0, 2.0, nbytes=index) for index, block in enumerate(blocks)]
    plain = make_plan(blocks, 2, costs=costs)
    again = make_plan(blocks, 2, costs=costs, recompute=True)
    assert plain.loads == (9.0, 12.0)
    assert again.starts == (0, 3)
    assert again.loads == (12.0, 12.0)
    assert again.period == 12.0
    assert again.balance == 1.0
    assert again.border_bytes == (2,)
    assert again.note == ""
    assert again.measured


def test_one_stage_never_recomputes() -> None:
    plan = make_plan(identities(1), 1, costs=[cost("0", 1.0, 2.0)], recompute=True)
    assert plan.loads == (3.0,)


def test_without_costs_parameters_decide_and_the_note_says_so() -> None:
    model = [nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(40, 40), nn.ReLU()]
    plan = make_plan(chain(model), 2)
    assert plan.stages == (("0", "1", "2"), ("3", "4"))
    assert plan.parameters == (12, 1640)
    assert "number of parameters" in plan.note
    assert plan.period is None
    assert not plan.measured
    assert make_plan(identities(6), 3).starts == (0, 2, 4)


def test_no_note_where_there_is_no_choice() -> None:
    blocks = identities(3)
    assert make_plan(blocks, 3).note == ""
    assert make_plan(blocks, 1).note == ""
    assert make_plan(blocks, 2, split=["1"]).note == ""


def test_named_split() -> None:
    plan = make_plan(identities(4), 2, split=["3"])
    assert plan.stages == (("0", "1", "2"), ("3",))
    with pytest.raises(PlanError, match=r"makes 2 stages, but 3 are asked for: name the 2 blocks"):
        make_plan(identities(4), 3, split=["3"])
    with pytest.raises(PlanError, match="no block is called 'x'"):
        make_plan(identities(4), 2, split=["x"])


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_blocks(stages: int) -> None:
    with pytest.raises(PlanError, match=r"3 blocks can be cut into 1 to 3 stages.*The blocks are: 0, 1, 2"):
        make_plan(identities(3), stages)


def test_wrong_number_of_costs() -> None:
    with pytest.raises(PlanError, match="3 blocks but costs of 1"):
        make_plan(identities(3), 2, costs=[cost("0", 1, 1)])


def test_automatic_cut_keeps_blocks_with_a_module_in_common_together() -> None:
    shared = nn.BatchNorm1d(4)
    model = [nn.Linear(4, 4), shared, nn.Tanh(), shared, nn.Linear(4, 4)]
    blocks = chain(model)
    costs = [cost(block.name, 1.0, 1.0) for block in blocks]
    assert make_plan(blocks, 2, costs=costs).stages == (("0",), ("1", "2", "3", "4"))
    assert make_plan(blocks, 3, costs=costs).stages == (("0",), ("1", "2", "3"), ("4",))
    assert make_plan(blocks, 3, costs=costs).parameters == (20, 8, 20)
    with pytest.raises(PlanError, match="only 3 stages are possible, not 4, because blocks '1' and '3' share buffer"):
        make_plan(blocks, 4, costs=costs)


def test_automatic_cut_may_separate_tied_weights() -> None:
    model = [nn.Linear(4, 4) for _ in range(4)]
    model[3].weight = model[0].weight
    plan = make_plan(chain(model), 4)
    assert plan.stages == (("0",), ("1",), ("2",), ("3",))
    assert plan.parameters == (20, 20, 20, 4)


def test_its_split_gives_the_same_cut_again() -> None:
    blocks = chain([nn.Linear(n, n) for n in (3, 30, 5, 20, 7)])
    plan = make_plan(blocks, 3)
    assert plan.split is not None
    assert make_plan(blocks, 3, split=plan.split).starts == plan.starts
    assert make_plan(blocks, 1).split == ()


def test_json_and_pickle() -> None:
    plan = make_plan(identities(5), 2, costs=[cost(str(i), 0.1, 0.3) for i in range(5)])
    text = json.dumps(plan_to_json(plan))
    assert plan_from_json(json.loads(text)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(plan_from_json(plan_to_json(plan)))


def test_text() -> None:
    text = str(make_plan(chain([nn.Linear(10, 100), nn.ReLU(), nn.Linear(100, 10)]), 2))
    lines = text.splitlines()
    assert lines[0].split() == ["stage", "blocks", "parameters", "relative", "cost"]
    assert lines[1].split() == ["0", "0", "1,100", "0.521"]
    assert lines[2].split() == ["1", "1", "..", "2", "(2)", "1,010", "0.479"]
    assert lines[3].startswith("balance 96%; balanced by number of parameters")
    assert len({len(line) for line in lines[:3]}) == 1
    assert "ms/micro-batch" in str(make_plan(identities(2), 2, costs=[cost("0", 1, 1), cost("1", 1, 1)]))
