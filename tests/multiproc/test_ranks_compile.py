"""Compiled stages on ranks: the same bits as in one process, and exact resume."""

from __future__ import annotations

import pytest

import compile_jobs
from compile_jobs import same
from unlatch.errors import ConfigError

METHODS = ("1f1b", "pipedream", "dtrp")


def test_ranks_and_resume_give_the_bits_of_one_process(ranks2, tmp_path):
    expected = {method: compile_jobs.trained(method, str(tmp_path / f"here-{method}")) for method in METHODS}
    for found in ranks2.run(compile_jobs.everywhere, METHODS, str(tmp_path)):
        for method, outcomes in found.items():
            assert all(same(outcome, expected[method]) for outcome in outcomes), method


def test_what_cannot_be_compiled_is_refused_by_every_rank(ranks2):
    with pytest.raises(ConfigError, match="zb-h1 does the two halves of a backward apart"):
        ranks2.run(compile_jobs.trained, "zb-h1")
