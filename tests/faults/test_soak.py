"""A long run that is disturbed all the time trains what the undisturbed one trains, and takes no more and more."""

from __future__ import annotations

import pytest
import torch

import unlatch
from soak_jobs import Soaked, left_behind, slope, soak


def _same(found: list[Soaked], expected: Soaked) -> None:
    for rank in found:
        assert rank.losses == expected.losses
        assert all(torch.equal(t, expected.state[name]) for name, t in rank.state.items())


def _steady(found: list[Soaked]) -> None:
    """No more threads and descriptors in the second half than in the first, and fewer threads after closing."""
    for rank in found:
        *during, closed = rank.taken
        half = len(during) // 2
        assert max(t.threads for t in during[half:]) <= max(t.threads for t in during[:half])
        assert max(t.descriptors for t in during[half:]) <= max(t.descriptors for t in during[:half])
        assert closed.threads < during[-1].threads
        assert closed.descriptors <= during[-1].descriptors


@pytest.mark.parametrize("method", ["pipedream", "auxnet"])
def test_a_disturbed_run_leaks_nothing(row, ranks2, method):
    line = row("soak", f"1,000 steps with random delays, {method}")
    found = ranks2.run(soak, method, 1000, True)
    _same(found, soak(method, 1000, False))
    _steady(found)
    line.found("weights bit for bit; no thread or descriptor more")


def test_many_runs_in_one_process_leak_nothing(row):
    line = row("soak", "6 runs one after the other on the same ranks")
    for rank in unlatch.launch(left_behind, 2, args=(["pipedream", "auxnet"] * 3,)):
        assert len(set(rank[1:])) == 1, rank
    line.found("no thread or descriptor more")


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["pipedream", "auxnet"])
def test_soak(row, method):
    """On fresh ranks: memory that an earlier run gave back would hide what this one takes."""
    line = row("soak", f"20,000 steps with random delays, {method}")
    found = unlatch.launch(soak, 2, args=(method, 20_000, True), timeout=500.0)
    _same(found, soak(method, 20_000, False))
    _steady(found)
    growth = [slope(rank.taken) for rank in found]
    assert max(growth) < 1.0
    line.found(f"weights bit for bit; {' and '.join(f'{g:+.2f}' for g in growth)} MB per 1,000 steps")
