"""O21: PETRA on real ranks equals the inline run bit for bit: weights, losses, statistics, reconstruction errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import petra_jobs
from rank_jobs import Outcome, differences
from unlatch.methods import PETRA

OPTIONS = [
    PETRA(microbatches=1),
    PETRA(microbatches=2, accumulate=2),
    PETRA(microbatches=2, order="1f1b", weights="average"),
    PETRA(microbatches=1, weights="stash", predict="geometric"),
    PETRA(microbatches=1, inputs="store", bn="forward"),
    PETRA(microbatches=1, store=(1,), bn="forward"),
]


@cache
def inline(method: PETRA, stages: int, blocks: int) -> Outcome:
    return petra_jobs.train_revnet(method, stages, blocks)


def check(pool: Any, jobs: list[tuple[PETRA, int, int]]) -> None:
    for rank, outcomes in enumerate(pool.run(petra_jobs.train_each, jobs)):
        for job, outcome in zip(jobs, outcomes, strict=True):
            assert differences(inline(*job), outcome) == [], f"rank {rank}, {job}"


@pytest.mark.parametrize("method", OPTIONS, ids=str)
def test_two_ranks(ranks2: Any, method: PETRA) -> None:
    check(ranks2, [(method, 2, 8), (method, 5, 8), (method, 8, 8)])


@pytest.mark.parametrize("method", OPTIONS, ids=str)
def test_four_ranks(ranks4: Any, method: PETRA) -> None:
    check(ranks4, [(method, 4, 8), (method, 8, 8)])


@pytest.mark.parametrize("blocks", [10, 18])
def test_one_block_per_stage_on_two_ranks(ranks2: Any, blocks: int) -> None:
    check(ranks2, [(PETRA(microbatches=2), blocks, blocks)])


def test_the_jobs_reconstruct_and_store() -> None:
    """The comparison is about something: inputs are reconstructed, with errors, and others stored."""
    outcome = inline(OPTIONS[0], 8, 8)
    errors = [max((e for _, e in history), default=None) for history in outcome["reconstruction"]]
    assert [e is not None for e in errors] == [False, True, True, False, True, False, True, False]
    assert max(e for e in errors if e is not None) > 1e-4
    assert {"evaluations", "stem.conv.weight"} <= set(differences(outcome, inline(OPTIONS[4], 8, 8)))
