"""Signs of life between ranks, with a store and several watchers in one process."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import ExitStack

import pytest

from unlatch.transport import health as module
from unlatch.transport.health import Health
from unlatch.transport.store import host_store

#: By the clock of the watchers, which stands still unless a test moves it: a starved thread is not a quiet rank.
LIMIT = 0.2
#: Seconds for things that happen at once unless the machine is busy.
PATIENCE = 100.0


class Hand:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def store(monkeypatch):
    """The store of a launcher."""
    hosted = host_store()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(hosted.port))
    return hosted


@pytest.fixture
def watch(store, hand):
    """Starts watchers of one run and stops them at the end."""
    with ExitStack() as stack:

        def start(rank, run="run", ranks=2):
            lost = queue.Queue()
            health = Health(run, rank, ranks, lambda r: f"stage {r}", lost.put, LIMIT, hand)
            stack.callback(health.close)
            return health, lost

        yield start


@pytest.fixture
def let_pass(store, hand):
    """Moves the clock by a part of the limit, after each of some ranks has looked at all others once more."""

    def beat(rank):
        key = f"unlatch/run/beat/{rank}"
        return int(store.get(key)) if store.check([key]) else 0

    def wait(part, *ranks):
        # What a rank reads after its next but one sign of life was written after this moment.
        goals = {rank: beat(rank) + 2 for rank in ranks}
        deadline = time.monotonic() + PATIENCE
        while any(beat(rank) < goal for rank, goal in goals.items()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        hand.now += part * LIMIT

    return wait


def test_quiet_ranks_are_named(watch, let_pass):
    first, lost = watch(0)
    second, nothing = watch(1)
    for _ in range(8):
        let_pass(0.4, 0, 1)
    assert lost.empty()
    let_pass(0, 1)
    let_pass(0, 0)  # by now the first has seen a sign of the second at the present time
    second.close()
    for _ in range(3):
        assert lost.empty()
        let_pass(0.4, 0)
    assert "rank 1 (stage 1) gave no sign of life for 0.2 s" in str(lost.get(timeout=PATIENCE))
    assert nothing.empty()
    first.close()


def test_who_was_suspended_blames_nobody_for_it(watch, let_pass):
    _, lost = watch(0)
    for _ in range(3):
        let_pass(5, 0)
    let_pass(0, 0)
    assert lost.empty()


def test_a_rank_that_never_gave_a_sign_is_named(watch, let_pass):
    _, lost = watch(0)
    for _ in range(3):
        let_pass(0.4, 0)
    assert "rank 1 (stage 1) gave no sign of life" in str(lost.get(timeout=PATIENCE))


def test_nobody_watches_after_closing(watch):
    first, _ = watch(0)
    assert [thread for thread in threading.enumerate() if thread.name == "unlatch-health"]
    first.close()
    first.close()
    assert [thread for thread in threading.enumerate() if thread.name == "unlatch-health"] == []


def test_a_store_that_is_slow_to_answer_is_no_loss(watch, monkeypatch):
    """Its host may be starved for seconds; with the five that were allowed once, the run ended."""
    given = []
    monkeypatch.setattr(module, "connect_store", lambda timeout: given.append(timeout))
    watch(0)
    assert given == [30.0]


def test_last_words_are_heard_although_the_process_lives_on(watch):
    _, lost = watch(0)
    second, _ = watch(1)
    second.leave_note("out of memory at batch 7")
    second.leave_note("an echo")
    assert str(lost.get(timeout=PATIENCE)) == "rank 1 (stage 1) stopped: out of memory at batch 7"


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


def test_one_rank_is_asked_to_stop_and_all_hear_it(watch):
    everyone = [watch(rank, ranks=3)[0] for rank in range(3)]
    assert [health.asked_to_stop() for health in everyone] == [None, None, None]
    everyone[1].ask_to_stop(15)
    assert everyone[1].asked_to_stop() == 15
    deadline = time.monotonic() + PATIENCE
    while [health.asked_to_stop() for health in everyone] != [15, 15, 15]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
