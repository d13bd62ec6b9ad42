"""Signs of life between ranks, with a store and several watchers in one process."""

from __future__ import annotations

import queue
import time
from contextlib import ExitStack

import pytest

from unlatch.runtime.health import Health
from unlatch.runtime.store import host_store

LIMIT = 1.0


@pytest.fixture
def store(monkeypatch):
    """The store of a launcher."""
    hosted = host_store()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(hosted.port))
    return hosted


@pytest.fixture
def watch(store):
    """Starts watchers of one run and stops them at the end."""
    with ExitStack() as stack:

        def start(rank, run="run", ranks=2):
            lost = queue.Queue()
            health = Health(run, rank, ranks, lambda r: f"stage {r}", lost.put, LIMIT)
            stack.callback(health.close)
            return health, lost

        yield start


def test_quiet_ranks_are_named(watch):
    first, lost = watch(0)
    second, nothing = watch(1)
    time.sleep(2 * LIMIT)
    assert lost.empty()
    second.close()
    assert "rank 1 (stage 1) gave no sign of life for 1 s" in str(lost.get(timeout=10 * LIMIT))
    assert nothing.empty()
    first.close()


def test_a_rank_that_never_gave_a_sign_is_named(watch):
    _, lost = watch(0)
    assert "rank 1 (stage 1) gave no sign of life" in str(lost.get(timeout=10 * LIMIT))


def test_last_words_are_heard_although_the_process_lives_on(watch):
    _, lost = watch(0)
    second, _ = watch(1)
    second.leave_note("out of memory at batch 7")
    second.leave_note("an echo")
    assert str(lost.get(timeout=5)) == "rank 1 (stage 1) stopped: out of memory at batch 7"


def test_a_broken_connection_is_explained_by_last_words_if_there_are_any(watch):
    first, _ = watch(0)
    second, _ = watch(1)
    assert "rank 1 (stage 1) is gone without a word (reset by peer)" in str(
        first.loss(1, RuntimeError("reset by peer"))
    )
    second.leave_note("a reason")
    assert str(first.loss(1)) == "rank 1 (stage 1) stopped: a reason"
    assert str(first.departure(1)) == "rank 1 (stage 1) stopped: a reason"


def test_leaving_without_words(watch):
    first, _ = watch(0)
    assert "rank 1 (stage 1) has closed its run while rank 0 still waits" in str(first.departure(1))


def test_runs_do_not_hear_each_other(watch):
    one, _ = watch(0, run="one")
    other, _ = watch(0, run="other")
    one.leave_note("only here")
    assert "without a word" in str(other.loss(1))


def test_without_a_store_nobody_watches(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    health = Health("run", 0, 2, str, lambda error: pytest.fail(str(error)), LIMIT)
    health.leave_note("to nobody")
    assert "rank 1 (1) is gone without a word" in str(health.loss(1))
    health.close()
