"""The partitioner against brute force."""

from __future__ import annotations

import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unlatch.errors import PlanError
from unlatch.plan import contiguous_split, part_costs


def brute_force(costs: list[int], parts: int, last: list[int] | None, borders: list[int] | None) -> list[int]:
    """All cuts, judged by largest cost, then sum of squares, then by how early the last stage starts, and so on."""
    count = len(costs)

    def judge(starts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        ends = [*starts[1:], count]
        found = []
        for part, (a, b) in enumerate(zip(starts, ends, strict=True)):
            items = last if last is not None and part == parts - 1 else costs
            cost = sum(items[a:b])
            if borders is not None:
                cost += (borders[a] if a > 0 else 0) + (borders[b] if b < count else 0)
            found.append(cost)
        return max(found), sum(cost**2 for cost in found), starts[::-1]

    return list(min(((0, *rest) for rest in combinations(range(1, count), parts - 1)), key=judge))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, list[int] | None, list[int] | None]:
    count = draw(st.integers(1, 9))
    numbers = st.lists(st.integers(0, 6), min_size=count, max_size=count)
    optional = st.one_of(st.none(), numbers)
    return draw(numbers), draw(st.integers(1, count)), draw(optional), draw(optional)


@given(problems())
@settings(max_examples=400, deadline=None)
def test_equals_brute_force(problem: tuple[list[int], int, list[int] | None, list[int] | None]) -> None:
    costs, parts, last, borders = problem
    starts = contiguous_split(costs, parts, last=last, borders=borders)
    assert starts == brute_force(costs, parts, last, borders)
    assert starts[0] == 0
    assert len(starts) == parts
    assert all(a < b for a, b in zip(starts, [*starts[1:], len(costs)], strict=True))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_largest_cost_is_optimal_for_any_numbers(costs: list[float], parts: int) -> None:
    parts = min(parts, len(costs))
    found = max(part_costs(costs, contiguous_split(costs, parts)))
    best = min(max(part_costs(costs, [0, *rest])) for rest in combinations(range(1, len(costs)), parts - 1))
    assert found == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_last_stage_without_recomputation_gets_more(stages: int) -> None:
    # With a backward of twice the forward, an even chain is balanced when the last stage has a share of 4/(3K+1).
    blocks = 30 * (3 * stages + 1)
    starts = contiguous_split([4.0] * blocks, stages, last=[3.0] * blocks)
    assert (blocks - starts[-1]) / blocks == pytest.approx(4 / (3 * stages + 1))


def test_a_dear_border_is_avoided() -> None:
    assert contiguous_split([1, 1, 1, 1], 2) == [0, 2]
    assert contiguous_split([1, 1, 1, 1], 2, borders=[0, 1, 9, 1]) == [0, 1]


def test_rest_is_evened_out() -> None:
    # One item sets the pace; a search for the smallest maximum alone could leave the others as 1 + 5.
    assert part_costs([9, 1, 1, 1, 1, 1, 1], contiguous_split([9, 1, 1, 1, 1, 1, 1], 3)) == [9, 3, 3]


@pytest.mark.parametrize("parts", [0, -1, 4])
def test_impossible_number_of_parts(parts: int) -> None:
    with pytest.raises(PlanError, match="3 blocks can be cut into 1 to 3 stages"):
        contiguous_split([1, 1, 1], parts)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_costs(bad: float) -> None:
    with pytest.raises(PlanError, match="finite and not negative"):
        contiguous_split([1.0, bad], 2)


def test_large_problem_is_fast() -> None:
    costs = np.random.default_rng(0).random(1000).tolist()
    start = time.process_time()
    starts = contiguous_split(costs, 64, last=costs)
    assert time.process_time() - start < 3.0  # measured: well under a second on an idle machine
    assert len(starts) == 64
    assert max(part_costs(costs, starts)) < 1.15 * sum(costs) / 64
