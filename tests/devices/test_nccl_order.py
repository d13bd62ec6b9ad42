"""Device tensors over NCCL with headers over gloo: the order of operations, searched through all interleavings."""

from __future__ import annotations

import pytest

from nccl_model import Model, Order, stuck, unclosed
from unlatch.schedule import ZBH1, GPipe, OneFOneB, one_f_one_b_async, ticked

GOOD = Order("per direction", "after the header")
SCHEDULES = {
    "1f1b": OneFOneB,
    "gpipe": GPipe,
    "zb-h1": ZBH1,
    "async 1f1b": one_f_one_b_async,
    "ticked": ticked,
    "ticked, backward first": lambda stages: ticked(stages, backward_first=True),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micros"), [(2, 5), (3, 3), (4, 2)])
def test_a_group_per_direction_and_receives_after_headers_never_get_stuck(name, ranks, micros):
    state, states = stuck(Model(SCHEDULES[name](ranks), micros, GOOD))
    assert state is None
    assert states > 20


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "async 1f1b", "ticked"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_group_gets_stuck_whether_receives_wait_for_headers_or_not(name, ranks):
    """Where a receive is always posted, sends queue up behind it; where it is not, both sides send first."""
    assert stuck(Model(SCHEDULES[name](ranks), 3, Order("one", "always")))[0] is not None
    assert stuck(Model(SCHEDULES[name](ranks), 3, Order("one", "after the header")))[0] is not None


def test_two_groups_do_not_need_headers_to_go_on():
    """They are there for other reasons: sizes of what comes, and kernels that would spin while nothing is sent."""
    assert stuck(Model(one_f_one_b_async(3), 3, Order("per direction", "always")))[0] is None


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_groups_are_closed_if_both_ends_begin_with_the_one_from_the_lower_rank(ranks, ring):
    """Peer by peer, the lowest first. Where each end begins with the group in which it sends, neither goes on."""

    pairs = sorted({(a, a + 1) for a in range(ranks - 1)} | ({(0, ranks - 1)} if ring else set()))

    def orders(first):
        """By rank, with that way of every pair closed first which `first` names for this rank and its peer."""
        found = []
        for rank in range(ranks):
            peers = [sum(pair) - rank for pair in pairs if rank in pair]
            begun = [first(rank, peer) for peer in peers]
            found.append([way for one in begun for way in (one, one[::-1])])
        return found

    assert unclosed(orders(lambda rank, peer: (min(rank, peer), max(rank, peer)))) == set()
    assert unclosed(orders(lambda rank, peer: (rank, peer))) == {*pairs, *(pair[::-1] for pair in pairs)}
