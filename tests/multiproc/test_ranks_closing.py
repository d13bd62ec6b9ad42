"""Ranks that close their run at different times: nobody is missed, and nobody waits for one that is lost."""

from __future__ import annotations

import pytest

import fault_jobs
from fault_jobs import LIMIT
from unlatch.errors import PeerLost

#: Seconds to close without the other rank once it counts as lost, on a busy machine.
BOUND = 10.0


def test_who_closes_first_is_not_missed_by_one_who_is_busy(ranks2, tmp_path):
    """It was called stuck: its heartbeat ended with its run."""
    assert ranks2.run(fault_jobs.closes, "busy", str(tmp_path)) == [None, None]


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_closing_ends_although_the_other_rank_does_not_close(ranks2, tmp_path, what):
    with pytest.raises(PeerLost):
        ranks2.run(fault_jobs.closes, what, str(tmp_path), timeout=LIMIT + 2 * BOUND)
    assert float((tmp_path / "closed0").read_text()) < LIMIT + BOUND
