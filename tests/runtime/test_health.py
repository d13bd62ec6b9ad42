"""Signs of life between ranks, with a store and several watchers in one process."""

from __future__ import annotations

import json
import queue
import threading
import time
from contextlib import ExitStack

import pytest

from unlatch.transport import health as module
from unlatch.transport.health import Health
from unlatch.transport.notes import Notary
from unlatch.transport.store import fetch, host_store

#: By the clock of the watchers, which stands still unless a test moves it: a starved thread is not a quiet rank.
LIMIT = 0.2
SECRET = "known to ranks only"
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

        def start(rank, run="run", ranks=2, clock=hand, secret=SECRET, **options):
            lost = queue.Queue()
            health = Health(run, rank, ranks, lambda r: f"stage {r}", lost.put, LIMIT, clock, secret=secret, **options)
            stack.callback(health.close)
            return health, lost

        yield start


@pytest.fixture
def let_pass(store, hand):
    """Moves the clock by a part of the limit, after each of some ranks has looked at all others once more."""

    def beat(rank):
        try:
            return json.loads(fetch(store, f"unlatch/run/beat/{rank}"))["note"]["count"]
        except (ValueError, TypeError, KeyError):
            time.sleep(0.01)  # what a stranger wrote there will be overwritten
            return beat(rank)

    def wait(part, *ranks):
        # What a rank reads after its next but one sign of life was written after this moment.
        goals = {rank: beat(rank) + 2 for rank in ranks}
        deadline = time.monotonic() + PATIENCE
        while any(beat(rank) < goal for rank, goal in goals.items()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        hand.now += part * LIMIT

    return wait


@pytest.fixture
def paralyse():
    """Makes a rank look stopped: it does nothing more at the store, until the end of the test."""
    woken = threading.Event()

    def stop(health):
        health._clerk.ask(lambda store: woken.wait(PATIENCE))

    yield stop
    woken.set()


def test_quiet_ranks_are_named(watch, let_pass, paralyse):
    first, lost = watch(0)
    second, nothing = watch(1, clock=Hand())
    for _ in range(8):
        let_pass(0.4, 0, 1)
    assert lost.empty()
    paralyse(second)
    let_pass(0, 0)
    let_pass(0, 0)  # by now the first has seen the last sign of the second
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


def ours():
    return [thread for thread in threading.enumerate() if thread.name in ("unlatch-health", "unlatch-store")]


def test_nobody_watches_after_closing(watch):
    first, _ = watch(0)
    assert len(ours()) == 2
    first.close()
    first.close()
    assert ours() == []


def test_who_has_closed_is_not_missed(watch, let_pass):
    """A neighbour may be busy for longer than the limit after that."""
    _, lost = watch(0)
    second, _ = watch(1)
    let_pass(0, 0, 1)
    second.close()
    for _ in range(8):
        let_pass(0.4, 0)
    assert lost.empty()


def test_a_store_that_does_not_answer_counts_as_the_loss_of_its_host(watch, paralyse, hand):
    """Its host was cut off: calls neither return nor fail."""
    health, lost = watch(1)
    paralyse(health)
    for _ in range(3):
        assert lost.empty()
        time.sleep(2 * LIMIT)  # a look at the clock between: else it was this process that stood still
        hand.now += 0.4 * LIMIT
    text = str(lost.get(timeout=PATIENCE))
    assert text.startswith("rank 0 (stage 0) or its host is gone, or cut off from this one: the store at 127.0.0.1:")
    assert text.endswith("is out of reach (no answer for 0.2 s)")
    began = time.monotonic()
    health.leave_note("to nobody")
    health.close()
    assert time.monotonic() - began < PATIENCE


def test_ranks_that_never_come_are_all_named(watch, let_pass):
    _, lost = watch(0, ranks=4, start_limit=5 * LIMIT)
    watch(2, ranks=4, clock=Hand())
    let_pass(0, 0, 2)
    for _ in range(12):
        assert lost.empty()
        let_pass(0.4, 0, 2)
    let_pass(0.4, 0)
    text = str(lost.get(timeout=PATIENCE))
    assert text.startswith("rank 1 (stage 1), rank 3 (stage 3) gave no sign of life within 1 s of the start")
    assert "UNLATCH_START_LIMIT" in text


def test_losses_are_told_to_those_who_ask_later(watch, let_pass):
    health, lost = watch(0)
    for _ in range(3):
        let_pass(0.4, 0)
    error = lost.get(timeout=PATIENCE)
    late = queue.Queue()
    health.report_to(late.put)
    assert late.get(timeout=PATIENCE) is error is health.failure()


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


@pytest.mark.parametrize(
    "value", [b"\xff\xfe", b"17", b"{}", b'{"note": {"rank": 1, "text": "x"}, "mac": "00"}', b"x" * 10**6]
)
def test_strangers_are_not_believed_and_do_not_end_the_watch(watch, let_pass, store, caplog, value):
    first, lost = watch(0)
    second, _ = watch(1)
    for what in ("failure", "stop", "beat/1", "beat/7", "other"):
        store.set(f"unlatch/run/{what}", value)
    let_pass(0, 0, 1)
    assert lost.empty()
    assert first.asked_to_stop() is None
    assert {message.split(" to ")[1].split(" in ")[0] for message in caplog.messages} >= {
        "unlatch/run/failure",
        "unlatch/run/stop",
    }
    # What a rank says is heard although a stranger has taken its place.
    second.ask_to_stop(15)
    deadline = time.monotonic() + PATIENCE
    while first.asked_to_stop() != 15:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.leave_note("a reason")
    assert str(lost.get(timeout=PATIENCE)) == "rank 1 (stage 1) stopped: a reason"


def test_notes_of_ranks_that_there_are_not(watch, let_pass, store):
    health, lost = watch(0)
    watch(1)
    for what, note in (("failure", {"rank": 2, "text": "x"}), ("stop", {"rank": -1, "signal": 15})):
        store.set(f"unlatch/run/{what}", Notary(SECRET).write(f"unlatch/run/{what}", note))
    let_pass(0, 0, 1)
    assert lost.empty()
    assert health.asked_to_stop() is None


def test_signs_of_life_that_are_written_again_are_none(watch, let_pass, paralyse, store):
    _, lost = watch(0)
    second, _ = watch(1, clock=Hand())
    let_pass(0, 0, 1)
    old = store.get("unlatch/run/beat/1")
    let_pass(0, 0, 1)
    paralyse(second)
    let_pass(0, 0)
    let_pass(0, 0)
    new = store.get("unlatch/run/beat/1")
    for value in (old, new, old, new):
        store.set("unlatch/run/beat/1", value)
        let_pass(0.4, 0)
    assert "rank 1 (stage 1) gave no sign of life" in str(lost.get(timeout=PATIENCE))


def test_a_watch_that_breaks_says_so(watch, monkeypatch):
    def broken(*args):
        raise KeyError("unheard of")

    monkeypatch.setattr(Health, "_judge", broken)
    _, lost = watch(0)
    assert str(lost.get(timeout=PATIENCE)) == "rank 0 cannot watch the others any more: KeyError: 'unheard of'"


def test_without_a_store_nobody_watches(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    health = Health("run", 0, 2, str, lambda error: pytest.fail(str(error)), LIMIT, secret=SECRET)
    health.leave_note("to nobody")
    assert "rank 1 (1) is gone without a word" in str(health.loss(1))
    health.close()
