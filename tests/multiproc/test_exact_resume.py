"""A run that is saved with batches under way and continued is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import pytest

import resume_jobs
import trainer_jobs
from order_jobs import CASES


@pytest.fixture(scope="module")
def saved_on_ranks(ranks2, tmp_path_factory):
    """Checkpoints of all cases, and what came of the runs that wrote them."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks2.run(resume_jobs.unbroken_everywhere, str(folder))[0]


def test_on_ranks(ranks2, saved_on_ranks):
    assert ranks2.run(resume_jobs.differing, str(saved_on_ranks[0])) == [[], []]


def test_on_ranks_over_gloo(ranks2, tmp_path):
    """As between machines: what links know of forms is no part of a checkpoint."""
    cases = ("1f1b", "pipedream", "dtrp", "petra", "layerpipe", "auxnet replay")
    assert ranks2.run(resume_jobs.differing_over, "gloo", cases, str(tmp_path)) == [[], []]


def test_on_ranks_with_larger_updates(ranks2, tmp_path):
    ranks2.run(resume_jobs.unbroken_everywhere, str(tmp_path), 2)
    assert ranks2.run(resume_jobs.differing, str(tmp_path), 2) == [[], []]


def test_from_ranks_to_one_process(saved_on_ranks):
    folder, expected = saved_on_ranks
    for case in CASES:
        found = resume_jobs.continued(case, 1, resume_jobs.place(folder, case), distributed=False)
        assert resume_jobs.same(resume_jobs.network(found), expected[case]), case


def test_from_one_process_to_ranks(ranks2, tmp_path):
    expected = {}
    for case in CASES:
        found = resume_jobs.unbroken(case, 1, resume_jobs.place(tmp_path, case), distributed=False)
        expected[case] = resume_jobs.network(found)
    for part in ranks2.run(resume_jobs.continued_everywhere, str(tmp_path)):
        assert [case for case in CASES if not resume_jobs.same(part[case], expected[case])] == []


def test_memory_orders_survive(tmp_path):
    """Convolutions of images in channels-last order are not the same bits in another order."""
    run = resume_jobs.image_run(seed=0)
    resume_jobs.feed_images(run, 0, 3)
    run.save(tmp_path / "checkpoint")
    inputs = [t.stride() for s in run.stations.values() for kept in s.stage.kept.values() for t in kept.inputs]
    again = resume_jobs.image_run(seed=1)
    again.load(tmp_path / "checkpoint")
    assert inputs == [t.stride() for s in again.stations.values() for k in s.stage.kept.values() for t in k.inputs]
    assert any(strides[1] == 1 for strides in inputs)
    expected = resume_jobs.feed_images(run, 3, 4)
    assert resume_jobs.feed_images(again, 3, 4) == expected


def test_sessions_on_ranks(ranks2, tmp_path):
    for differing in ranks2.run(trainer_jobs.differing, str(tmp_path), [3, 5]):
        assert differing == []


@pytest.mark.parametrize("every", ["2 batches", "0.00001 minutes"])
@pytest.mark.parametrize("case", ["pipedream", "dtrp", "auxvar"])
def test_checkpoints_written_beside_training(ranks2, tmp_path, case, every):
    for wrong in ranks2.run(trainer_jobs.all_of_one, case, str(tmp_path), every):
        assert wrong == []
