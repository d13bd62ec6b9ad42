"""A schedule that cannot be executed is refused before anything runs, with the entry that waits and what for."""

from __future__ import annotations

import re

import pytest

from unlatch.errors import ScheduleError
from wrong_schedules import WRONG, build, build_on_rank


@pytest.mark.parametrize("name", WRONG)
def test_refused_inline(name):
    with pytest.raises(ScheduleError, match=WRONG[name][1]):
        build(name)


@pytest.mark.parametrize("name", WRONG)
def test_refused_on_two_ranks(ranks2, name):
    for said in ranks2.run(build_on_rank, name):
        assert re.search(WRONG[name][1], said), said
