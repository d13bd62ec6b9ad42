"""The cut for AuxNet against all cuts, and the costs of predictions against the networks that are built."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unlatch.errors import PlanError
from unlatch.methods.auxnet.partition import auxnet_split, auxnet_starts, prediction_costs
from unlatch.methods.local.speedup import LayerParallelTimes
from unlatch.models import build
from unlatch.nn.auxiliary import coarse_parts, find_borders, measure_blocks
from unlatch.nn.chain import chain


def dearest(costs: list[int], predictions: list[int], starts: tuple[int, ...]) -> int:
    ends = (*starts[1:], len(costs))
    return max(sum(costs[a:b]) + predictions[a] for a, b in zip(starts, ends, strict=True))


@given(data=st.data(), count=st.integers(1, 8))
@settings(max_examples=60)
def test_no_other_cut_is_better(data, count):
    costs = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    predictions = [0, *data.draw(st.lists(st.integers(0, 9), min_size=count - 1, max_size=count - 1))]
    stages = data.draw(st.integers(1, count))
    found = auxnet_starts(costs, predictions, stages)
    others = [(0, *rest) for rest in combinations(range(1, count), stages - 1)]
    assert dearest(costs, predictions, tuple(found)) == min(dearest(costs, predictions, o) for o in others)


def test_more_stages_than_blocks():
    with pytest.raises(PlanError, match="every stage needs a block"):
        auxnet_starts([1, 1], [0, 1], 3)


@pytest.mark.parametrize("depth", [1, 2])
def test_predictions_cost_what_is_built(depth):
    blocks = chain(build("resnet20"))
    x = torch.zeros(2, 3, 16, 16)
    shapes = [tuple(out.shape[1:]) for out in measure_blocks(blocks, x)]
    counted = prediction_costs([1.0] * len(blocks), shapes, depth)
    for start in range(1, len(blocks)):
        (border,) = find_borders(blocks, [0, start], x)
        (part,) = coarse_parts(border, [0, start], depth, shared=False)
        assert len(part) == counted[start], start


def test_the_first_stage_gets_more_blocks():
    blocks = chain(build("resnet20"))
    x = torch.zeros(8, 3, 32, 32)
    (name,) = auxnet_split(blocks, x, 2)
    assert [b.name for b in blocks].index(name) >= 4


def test_the_formula_says_when_it_cannot_pay():
    times = LayerParallelTimes(0.1, 1.0, 2.0, 0.5, 1.0, 2.0)
    assert times.break_even == float("inf")
    assert all(times.speed_up(k) < 1 for k in (1, 2, 100))
    good = LayerParallelTimes(0.1, 1.0, 2.0, 0.0, 0.5, 0.5)
    assert good.speed_up(good.break_even) == pytest.approx(1.0)
    assert good.speed_up(10**9) == pytest.approx(good.limit)
