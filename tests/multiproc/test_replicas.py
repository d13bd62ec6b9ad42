"""Replicas on ranks: the same as in one process, bit for bit, whatever is asked of them."""

from __future__ import annotations

import time

import pytest
import torch

import replica_jobs
import unlatch
from rank_jobs import differences
from unlatch.errors import ConfigError, PeerLost

#: Those that replicas can train, see tests/equivalence/test_replicas_whole.py.
METHODS = tuple(n for n in unlatch.methods.names() if unlatch.methods.get(n).unreplicable is None)


def check(pool, methods, stages, replicas):
    expected = replica_jobs.train_each(methods, stages, replicas)
    for rank, found in enumerate(pool.run(replica_jobs.train_each, methods, stages, replicas)):
        for name in methods:
            assert differences(expected[name], found[name]) == [], f"{name}, rank {rank}"


#: One of every kind.
SOME = ("bp", "gpipe", "1f1b", "zb-h1", "pipedream", "dtrp", "petra", "dgl", "auxnet")


def test_there_is_much_to_compare():
    assert set(SOME) <= set(METHODS)


def test_two_replicas_on_a_rank_each(ranks2):
    check(ranks2, METHODS, 2, 2)


def test_two_replicas_on_two_ranks_each(ranks4):
    check(ranks4, SOME, 2, 2)


def test_four_replicas_on_a_rank_each(ranks4):
    check(ranks4, ("1f1b", "pipedream", "dtr", "dgl"), 2, 4)


def check_parts(pool, methods, stages, replicas):
    expected = replica_jobs.train_each(methods, stages, replicas)
    inline = replica_jobs.train_each_in_parts(methods, stages, replicas)
    for found in (inline, *pool.run(replica_jobs.train_each_in_parts, methods, stages, replicas)):
        for name in methods:
            assert differences(expected[name], found[name]) == [], name


def test_parts_that_leave_during_the_backward_change_no_bit(ranks2):
    check_parts(ranks2, METHODS, 2, 2)


def test_parts_of_shares_of_four_replicas_change_no_bit(ranks4):
    check_parts(ranks4, ("1f1b", "zb-h1", "dtr", "petra", "dgl"), 2, 4)


def test_parts_travel_over_gloo(ranks2):
    expected = replica_jobs.over_gloo("dtr", 2)
    for found in ranks2.run(replica_jobs.over_gloo, "dtr", 2):
        assert differences(expected, found) == []


def test_any_number_of_parameters_may_be_without_a_gradient_over_gloo(ranks2):
    """They travelled as numbers in the description of a message, which may be only so long."""
    expected = replica_jobs.many_without_gradient(3000)
    for found in ranks2.run(replica_jobs.many_without_gradient, 3000, "gloo"):
        assert differences(expected, found) == []


@pytest.mark.parametrize("name", ["1f1b", "dtrp"])
def test_replicas_are_alike_on_all_ranks_and_equal_to_one_with_the_whole_batch(ranks4, name):
    expected = replica_jobs.train_smooth(name, 2)
    weights = {}
    for found in ranks4.run(replica_jobs.train_smooth_replicas, name, 2, 2):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12, abs=0)
        assert all((found["state"][k] - t).abs().max() <= 1e-12 for k, t in expected["state"].items())
        weights |= found["own"]
    assert sorted(weights) == [0, 1, 2, 3]
    for number in (2, 3):
        assert all(torch.equal(a, b) for a, b in zip(weights[number], weights[number - 2], strict=True))


def test_sessions(ranks4):
    methods = ("1f1b", "dtr", "dgl")
    expected = replica_jobs.fit(methods, 2)
    for found in ranks4.run(replica_jobs.fit, methods, 2):
        for name in methods:
            ranks = [row[2] for row in found[name].pop("rows")]
            assert ranks == [0, 1, 2, 3]
            inline = {key: value for key, value in expected[name].items() if key != "rows"}
            assert differences(inline, found[name]) == [], name


@pytest.mark.parametrize("name", ["1f1b", "dtr", "auxnet"])
def test_exact_resume(ranks2, ranks4, tmp_path, name):
    path = str(tmp_path / "saved")
    expected = ranks2.run(replica_jobs.saves, name, path, 2)[0]
    # On as many ranks, on others, and in one process.
    for found in (*ranks2.run(replica_jobs.loads, name, path, 2), *ranks4.run(replica_jobs.loads, name, path, 2)):
        assert differences(expected, found) == []
    assert differences(expected, replica_jobs.loads(name, path, 2)) == []


@pytest.mark.parametrize("name", ["1f1b", "dtrp"])
def test_exact_resume_with_parts_that_leave_early(ranks2, ranks4, tmp_path, name):
    path = str(tmp_path / "saved")
    expected = replica_jobs.saves(name, str(tmp_path / "whole"), 2)
    for found in ranks2.run(replica_jobs.saves_in_parts, name, path, 2):
        assert differences(expected, found) == []
    for pool in (ranks2, ranks4):
        for found in pool.run(replica_jobs.loads_in_parts, name, path, 2):
            assert differences(expected, found) == []
    assert differences(expected, replica_jobs.loads_in_parts(name, path, 2)) == []


@pytest.mark.parametrize(("wrote", "reads"), [(2, 1), (1, 2)])
def test_other_numbers_of_replicas_go_on_by_names(ranks2, tmp_path, wrote, reads):
    path = str(tmp_path / "saved")
    ranks2.run(replica_jobs.saves, "dtr", path, wrote)
    found = ranks2.run(replica_jobs.loads, "dtr", path, reads)
    inline = replica_jobs.loads("dtr", path, reads)
    assert all(differences(inline, one) == [] for one in found)


@pytest.mark.parametrize("row", [0, 7])
@pytest.mark.parametrize("job", [replica_jobs.skips, replica_jobs.skips_in_parts])
def test_a_row_that_is_not_finite_is_left_out_by_all(ranks2, row, job):
    expected = replica_jobs.skips("pipedream", 2, row)
    assert expected["left_out"] == 1
    for found in (job("pipedream", 2, row), *ranks2.run(job, "pipedream", 2, row)):
        assert differences(expected, found) == []


def test_ranks_that_cannot_be_shared_out(ranks4):
    for text in ranks4.run(replica_jobs.refused, 3):
        assert text.startswith("ConfigError: 4 ranks cannot be shared out among 3 replicas")
    for text in ranks4.run(replica_jobs.refused, 1):
        assert "4 ranks cannot share 2 stage(s)" in text


def test_ranks_that_want_different_numbers(ranks2):
    with pytest.raises(ConfigError, match=r"disagree on replicas: [12] here, [12] there"):
        ranks2.run(replica_jobs.disagree)


def test_a_dead_rank_of_any_replica_is_named_everywhere(ranks4, tmp_path):
    stage, begun = 2, time.monotonic()
    with pytest.raises(PeerLost, match=rf"rank {stage} \(stage {stage % 2} of replica {stage // 2}\)"):
        ranks4.run(replica_jobs.breaks, "pipedream", 2, 2, stage, str(tmp_path))
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sorted(told) == [f"rank{rank}" for rank in range(4) if rank != stage]
    for text in told.values():
        assert f"rank {stage} (stage {stage % 2} of replica {stage // 2})" in text
        assert float(text.split()[0]) < 20.0
    assert time.monotonic() - begun < 60.0
