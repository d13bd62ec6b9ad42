"""Device tensors over NCCL with headers over gloo: the order of operations, searched through all interleavings."""

from __future__ import annotations

import pytest

from nccl_model import Model, Order, stuck
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
