"""Tasks on two ranks give the weights, losses and evaluations of one process, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import unlatch
from layerpipe_jobs import MIXED, UNIT, train_all_tasks
from rank_jobs import differences

CASES = [
    ("tanh", UNIT, 2, "divisible"),
    ("tanh", UNIT, 4, "divisible", {"weights": "average"}),
    ("tanh", MIXED, 3, "divisible", {"accumulate": 2}),
    ("tanh", UNIT, 6, "atomic", {"weights": "latest"}),
    ("tanh", MIXED, 6, "factor", {"extra_delay": 1}),
    ("residual", UNIT, 3, "atomic"),
    ("residual", UNIT, 6, "atomic", {"weights": "average"}),
    ("conv", MIXED, 2, "atomic"),
    ("conv", UNIT, 2, "divisible"),
    ("norm", UNIT, 6, "atomic"),
    ("tanh", MIXED, 2, "stages", {"extra_delay": 1}),
    ("tanh", MIXED, 2, "stages", {"weights": "latest", "predict": "geometric"}),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[unlatch.Ranks]:
    with unlatch.Ranks(2) as started:
        yield started


def test_two_ranks_equal_one_process(ranks):
    inline = train_all_tasks(CASES)
    for rank, outcomes in enumerate(ranks.run(train_all_tasks, CASES, timeout=240)):
        for case, one, other in zip(CASES, inline, outcomes, strict=True):
            assert differences(one, other) == [], (rank, case)


def test_runs_differ_where_they_should():
    one, other = train_all_tasks([CASES[0], ("tanh", MIXED, 4, "divisible")])
    assert {"steps", "evaluations", "0.0.weight"} <= set(differences(one, other))
