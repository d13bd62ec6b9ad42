"""All schedule generators, and hypothesis strategies for runs of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from unlatch.schedule import (
    ZBH1,
    ZBH2,
    GPipe,
    OneFOneB,
    Schedule,
    Sequential,
    forward_locked,
    one_f_one_b_async,
    ticked,
)

FLUSHED: dict[str, Callable[[int], Schedule]] = {
    "sequential": Sequential,
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "zb-h1": ZBH1,
    "zb-h2": ZBH2,
}
ASYNCHRONOUS: dict[str, Callable[[int], Schedule]] = {
    "ticked": ticked,
    "ticked, backward first": lambda stages: ticked(stages, backward_first=True),
    "pipedream": one_f_one_b_async,
    "forward locked": forward_locked,
}
ALL = {**FLUSHED, **ASYNCHRONOUS}

schedules = st.builds(lambda name, stages: ALL[name](stages), st.sampled_from(sorted(ALL)), st.integers(1, 8))
groups = st.lists(st.integers(1, 6), min_size=1, max_size=8)
