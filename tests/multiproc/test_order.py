"""What runs is what the schedule says: recorded events are exactly its entries, in order, per station."""

from __future__ import annotations

import pytest

import order_jobs
import unlatch
from order_jobs import CASES, accumulates, recorded


def test_every_method_is_among_the_cases():
    assert {name for name, _ in CASES.values()} == set(unlatch.methods.names())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_events_are_the_entries_inline(case, accumulate):
    if accumulate > 1 and not accumulates(case):
        pytest.skip("needs one update per batch")
    done, expected = recorded(case, accumulate, distributed=False)
    assert done == {station: stream for station, stream in expected.items() if stream}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_events_are_the_entries_on_two_ranks(ranks2, accumulate):
    found = ranks2.run(order_jobs.recorded_everywhere, accumulate)
    for case in found[0]:
        done, expected = {}, found[0][case][1]
        for rank in found:
            assert rank[case][1] == expected, case
            done |= rank[case][0]
        assert done == {station: stream for station, stream in expected.items() if stream}, case
        assert all(len(rank[case][0]) < len(done) for rank in found), case
