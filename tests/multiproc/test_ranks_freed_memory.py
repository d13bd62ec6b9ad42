"""Ranks keep the memory that they free, unless their user has set up the allocator."""

from __future__ import annotations

import sys

import pytest

import rank_jobs
from unlatch.transport.memory import keep_freed_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked to")
def test_memory_that_a_rank_frees_is_not_taken_anew(ranks1):
    [faults] = ranks1.run(rank_jobs.faults_of_a_batch)
    pages = rank_jobs.TENSORS * rank_jobs.PAGES
    assert faults < pages / 20, f"{faults} page faults for {pages} pages that had been freed"


def test_an_allocator_that_the_user_has_set_up_stays_as_it_is(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    assert not keep_freed_memory()
