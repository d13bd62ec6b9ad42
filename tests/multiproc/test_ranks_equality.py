"""The main test of the runtime: inline and distributed agree bit for bit (weights, buffers, losses, evaluations)."""

from __future__ import annotations

from functools import cache

import pytest

import rank_jobs
import unlatch

METHODS = unlatch.methods.names()


@cache
def inline(method: str, stages: int) -> rank_jobs.Outcome:
    return rank_jobs.train_conv(method, stages)


def check(pool, method, stage_counts):
    by_rank = pool.run(rank_jobs.train_conv_each, method, stage_counts)
    for rank, outcomes in enumerate(by_rank):
        for stages, outcome in outcomes.items():
            assert rank_jobs.differences(inline(method, stages), outcome) == [], f"rank {rank}, {stages} stages"


@pytest.mark.parametrize("method", METHODS)
def test_one_rank(ranks1, method):
    check(ranks1, method, (1, 2, 3, 4))


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks(ranks2, method):
    check(ranks2, method, (2, 3, 4))


@pytest.mark.parametrize("method", METHODS)
def test_four_ranks(ranks4, method):
    check(ranks4, method, (4,))


def test_the_comparison_sees_small_differences():
    one = rank_jobs.train_conv("dtr", 2)
    other = rank_jobs.train_conv("dtr", 2, seed=4)
    assert {"steps", "evaluations", "0.1.running_mean", "3.3.weight"} <= set(rank_jobs.differences(one, other))
