"""A run that is saved with batches under way and continued is, bit for bit, the run that was never stopped."""

from __future__ import annotations

import pytest

import resume_jobs
from order_jobs import CASES


@pytest.mark.parametrize("accumulate", [1, 2])
def test_on_ranks(ranks2, tmp_path, accumulate):
    for wrong in ranks2.run(resume_jobs.broken_everywhere, str(tmp_path), accumulate):
        assert wrong == []


def test_from_ranks_to_one_process(ranks2, tmp_path):
    expected = ranks2.run(resume_jobs.unbroken_everywhere, str(tmp_path))[0]
    for case in CASES:
        found = resume_jobs.continued(case, 1, str(tmp_path / case.replace(" ", "_")), distributed=False)
        assert resume_jobs.same((found[0], found[1][:8]), expected[case]), case


def test_from_one_process_to_ranks(ranks2, tmp_path):
    expected = {}
    for case in CASES:
        found = resume_jobs.unbroken(case, 1, str(tmp_path / case.replace(" ", "_")), distributed=False)
        expected[case] = found[0], found[1][:8]
    for part in ranks2.run(resume_jobs.continued_everywhere, str(tmp_path)):
        assert [case for case in CASES if not resume_jobs.same(part[case], expected[case])] == []
