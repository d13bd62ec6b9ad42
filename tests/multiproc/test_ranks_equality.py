"""The main test of the runtime: inline and distributed agree bit for bit (weights, buffers, losses, evaluations)."""

from __future__ import annotations

import threading
from functools import cache

import pytest

import fault_jobs
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


def test_gloo_and_shared_memory_carry_the_same(ranks2):
    """Ranks of one machine use the second, which needs no threads, unless they are told otherwise."""
    names = ("bp", "1f1b", "pipedream", "dtrp", "layerpipe", "auxnet")
    for transport, by_threads in (("auto", False), ("gloo", True)):
        for found, threads in ranks2.run(rank_jobs.train_conv_over, transport, names):
            assert any(name.startswith("unlatch-receive") for name in threads) == by_threads
            for name in names:
                assert rank_jobs.differences(inline(name, 2), found[name]) == [], f"{name} over {transport}"


@pytest.mark.parametrize("stages", [2, 3])
def test_the_norm_of_the_whole_model(ranks2, stages):
    names = ("bp", "gpipe", "1f1b", "zb-h1", "zb-h2")
    expected = rank_jobs.train_conv_by_whole_norm(names, stages)
    for found in ranks2.run(rank_jobs.train_conv_by_whole_norm, names, stages):
        for name in names:
            assert rank_jobs.differences(expected[name], found[name]) == [], name


def test_learning_rates_that_change_once_per_epoch(ranks2):
    names = ("1f1b", "pipedream", "dtrp", "dgl")
    expected = rank_jobs.fit_with_rates_per_epoch(names)
    for found in ranks2.run(rank_jobs.fit_with_rates_per_epoch, names):
        for name in names:
            assert rank_jobs.differences(expected[name], found[name]) == [], name


def test_the_comparison_sees_small_differences():
    one = rank_jobs.train_conv("dtr", 2)
    other = rank_jobs.train_conv("dtr", 2, seed=4)
    assert {"steps", "evaluations", "0.1.running_mean", "3.3.weight"} <= set(rank_jobs.differences(one, other))


def test_two_runs_at_the_same_time(ranks2, ranks4):
    found = {}

    def train(pool):
        found[pool.size] = pool.run(fault_jobs.survives, "fdg", 4)

    threads = [threading.Thread(target=train, args=(pool,)) for pool in (ranks2, ranks4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = fault_jobs.survives("fdg", 4)
    assert all(rank_jobs.differences(expected, outcome) == [] for outcomes in found.values() for outcome in outcomes)
