"""A dead, stuck or wrong rank ends the run, with the culprit's name, and nothing is left behind.

What ends a run here is the event itself: ranks that only ran out of patience would outlast the timeout of every test.
How soon it does is bounded where it matters, in seconds that a busy machine keeps as well.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path

import psutil
import pytest

import fault_jobs
from fault_jobs import LIMIT
from rank_jobs import differences
from unlatch.errors import ConfigError, PeerLost, StageFailed, UnlatchError
from unlatch.transport import launch

#: Seconds in which a killed rank is named by all others, and a stopped one after the limit, on a busy machine.
BOUND = 10.0


@pytest.fixture
def hasty(monkeypatch):
    """The launcher does not wait for a rank that was stopped: it has nothing more to say."""
    monkeypatch.setattr(launch, "_GRACE", 0.5)


def shared_memory(pids: list[int]) -> set[str]:
    """What these processes left there; others come and go as they like."""
    own = tuple(f"torch_{pid}_" for pid in pids)
    return {path.name for path in Path("/dev/shm").glob("*") if path.name.startswith((*own, "gloo", "unlatch"))}


class Wreck:
    """Break a pool and look at what is left."""

    def __init__(self, pool, folder):
        self.pool, self.folder = pool, folder
        self.pids = pool.run(os.getpid)

    def run(self, kind, method, what, at_stage, **options):
        before = shared_memory(self.pids)
        with pytest.raises(kind) as caught:
            self.pool.run(
                fault_jobs.breaks, method, self.pool.size, what, at_stage, str(self.folder), *options.values()
            )
        self.text = "".join(traceback.format_exception(caught.value))
        self.reports = {}
        for rank in range(self.pool.size):
            if (self.folder / f"rank{rank}").exists():
                self.reports[rank] = (self.folder / f"rank{rank}").read_text()
        assert not [pid for pid in self.pids if psutil.pid_exists(pid)]
        assert shared_memory(self.pids) <= before
        return caught.value

    def delays(self, since):
        """Seconds from the moment that a file was written to the report of each rank."""
        begin = since.stat().st_mtime
        return [(self.folder / f"rank{rank}").stat().st_mtime - begin for rank in self.reports]


@pytest.mark.parametrize(("what", "at_stage"), [("forward", 0), ("backward", 1), ("loss", 1), ("optimizer", 0)])
def test_user_code_that_raises(ranks2, tmp_path, what, at_stage):
    wreck = Wreck(ranks2, tmp_path)
    error = wreck.run(StageFailed, "dtr", what, at_stage)
    expected = {"loss": "forward", "optimizer": "update"}.get(what, what)
    assert f"stage {at_stage} failed in" in str(error)
    assert expected in str(error)
    assert f"ValueError: boom in {what}" in str(error)
    # The user's own line once, and the other rank's echo not at all.
    assert wreck.text.count(f'raise ValueError("boom in {what}")') == 1
    assert "PeerLost" not in wreck.text
    other = wreck.reports[1 - at_stage]
    assert other.startswith(f"PeerLost: rank {at_stage} (stage {at_stage}) stopped:")
    assert f"boom in {what}" in other


@pytest.mark.parametrize(("pool", "victim"), [("ranks2", 0), ("ranks2", 1), ("ranks4", 1)])
def test_killed_rank(request, tmp_path, pool, victim):
    """The first, the last, or one between, of whom the farthest rank hears through its neighbour."""
    wreck = Wreck(request.getfixturevalue(pool), tmp_path)
    moment = tmp_path / "moment"
    error = wreck.run(PeerLost, "dtr", "kill", victim, limit=fault_jobs.NEVER, note=str(moment))
    assert max(wreck.delays(moment)) < BOUND
    assert f"rank {victim} was killed by signal 9 (SIGKILL)" in str(error)
    assert wreck.reports.keys() == set(range(wreck.pool.size)) - {victim}
    for report in wreck.reports.values():
        assert report.startswith("PeerLost: ")
        assert f"rank {victim} (stage {victim})" in report


def test_a_rank_killed_for_lack_of_memory(ranks2, tmp_path):
    """As the kernel does it: the launcher says how much there was, the other rank who it was and at which batch."""
    error = Wreck(ranks2, tmp_path).run(PeerLost, "dtr", "kill", 1)
    first, held, seen = str(error).splitlines()[:3]
    assert first.endswith("the system may have, for lack of memory")
    assert re.search(r"the largest rank that has ended held [\d.]+ [MG]B: fewer samples in a batch, more micro-", held)
    assert "what rank 0 saw of it: rank 1 (stage 1) is gone" in seen
    assert re.search(r"stage 0 waited for the \w+ message of batch \d+", str(error))


def test_a_stage_without_memory(ranks2, tmp_path):
    wreck = Wreck(ranks2, tmp_path)
    text = str(wreck.run(StageFailed, "dtr", "memory", 1)).splitlines()[0]
    assert "stage 1 failed in the forward of batch 2: RuntimeError: " in text
    assert "can't allocate memory" in text
    assert re.search(r"Out of memory: it keeps [\d.]+ k?B for batches under way, its process held [\d.]+ [MG]B", text)
    assert "more micro-batches" in text
    assert wreck.reports[0].startswith("PeerLost: rank 1 (stage 1) stopped: stage 1 failed in the forward of batch 2")


def test_a_stage_without_memory_inline():
    with pytest.raises(StageFailed, match=r"stage 1 failed in the forward of batch 2.*Out of memory"):
        fault_jobs.survives("dtr", 2, "memory", 1, None)


def test_rank_that_exits(ranks2, tmp_path):
    wreck = Wreck(ranks2, tmp_path)
    assert "rank 1 " in str(wreck.run(PeerLost, "pipedream", "exit", 1))
    assert "rank 1 (stage 1) is gone without a word" in wreck.reports[0]


def test_stopped_rank(ranks2, hasty, tmp_path):
    wreck = Wreck(ranks2, tmp_path)
    moment = tmp_path / "moment"
    error = wreck.run(PeerLost, "dtr", "stop", 1, limit=LIMIT, note=str(moment))
    assert max(wreck.delays(moment)) < LIMIT + BOUND
    assert f"rank 1 (stage 1) gave no sign of life for {LIMIT:g} s" in str(error)
    assert "stall_limit" in str(error)


@pytest.mark.parametrize(
    ("what", "text"),
    [("kill", "rank 1 was killed by signal 9"), ("stop", f"rank 1 (stage 1) gave no sign of life for {LIMIT:g} s")],
)
def test_rank_lost_while_the_others_wait_for_all(ranks2, request, what, text):
    if what == "stop":
        request.getfixturevalue("hasty")
    pids = ranks2.run(os.getpid)
    with pytest.raises(PeerLost) as caught:
        ranks2.run(fault_jobs.breaks_between_steps, what)
    assert text in str(caught.value)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_short_pause_changes_nothing(ranks2, tmp_path):
    note, done = tmp_path / "pid", threading.Event()

    def wake():
        # Only a process that has stopped can be woken: a signal that comes too early is lost.
        while not (note.exists() and psutil.Process(int(note.read_text())).status() == psutil.STATUS_STOPPED):
            if done.wait(0.05):
                return
        time.sleep(1.0)
        os.kill(int(note.read_text()), signal.SIGCONT)

    waker = threading.Thread(target=wake)
    waker.start()
    try:
        found = ranks2.run(fault_jobs.survives, "dtrp", 2, "stop", 1, str(note))
    finally:
        done.set()
        waker.join()
    expected = fault_jobs.survives("dtrp", 2, "", 0, None)
    assert all(differences(expected, outcome) == [] for outcome in found)


@pytest.mark.parametrize("slow", [0, 1])
def test_slow_stage_changes_nothing(ranks2, slow):
    found = ranks2.run(fault_jobs.survives, "pipedream", 2, "slow", slow, None)
    expected = fault_jobs.survives("pipedream", 2, "", 0, None)
    assert all(differences(expected, outcome) == [] for outcome in found)


@pytest.mark.parametrize("method", ["bp", "dtrp"])
def test_loss_that_is_not_a_number(ranks2, method):
    below, above = ranks2.run(fault_jobs.reported, fault_jobs.becomes_nan, method)
    assert above.startswith("NonFiniteLoss: the loss of batch 2")
    assert "is nan (stage 1, after 2 updates, lr 0.1). Lower the learning rate, clip gradients" in above
    assert below.startswith("PeerLost: rank 1 (stage 1) stopped: the loss of batch 2")


def test_wrong_batch_is_refused_before_anything_is_sent(ranks2):
    below, above = ranks2.run(fault_jobs.reported, fault_jobs.bad_batch)
    assert below.startswith("ShapeMismatch: every tensor of a batch must have the same number of samples")
    assert above.startswith("PeerLost: rank 0 (stage 0) stopped: every tensor of a batch")


def test_data_loader_that_raises(ranks2):
    pids = ranks2.run(os.getpid)
    with pytest.raises(UnlatchError, match="rank 0 raised OSError: the disk is gone"):
        ranks2.run(fault_jobs.loader_breaks)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("weights", "initial weights"),
        ("method", "method"),
        ("stages", "stages"),
        ("split", "split"),
        ("seed", "seed"),
        ("precision", "precision"),
        ("clip_grad_norm", "clip_grad_norm"),
        ("loss_reduction", "loss_reduction"),
    ],
)
def test_ranks_that_disagree(ranks2, what, named):
    reports = ranks2.run(fault_jobs.reported, fault_jobs.disagree, what)
    for rank, report in enumerate(reports):
        assert report.startswith(f"ConfigError: ranks {rank} and {1 - rank} disagree on {named}: "), report


def test_functions_in_a_method_are_no_disagreement(ranks2):
    expected = fault_jobs.crosses(2)
    assert all(differences(expected, found) == [] for found in ranks2.run(fault_jobs.crosses, 2))


def test_more_ranks_than_stages(ranks2):
    for report in ranks2.run(fault_jobs.reported, fault_jobs.too_few_stages):
        assert report == (
            "PlanError: 2 ranks cannot share 1 stage(s): start at most 1 processes, or cut the model into more stages"
        )


@pytest.mark.parametrize("method", ["bp", "dtr"])
@pytest.mark.parametrize(("steps", "waiting"), [((6, 3), 0), ((3, 6), 1)])
def test_ranks_with_different_numbers_of_batches(ranks2, steps, waiting, method):
    reports = ranks2.run(fault_jobs.stops_early, steps, method)
    assert reports[1 - waiting] == "no error"
    assert reports[waiting].startswith(f"PeerLost: rank {1 - waiting} (stage {1 - waiting}) has closed its run")


def test_results_that_cannot_travel(ranks1):
    with pytest.raises(ConfigError, match="cannot be sent back"):
        ranks1.run(fault_jobs.returns_what_cannot_travel)


def test_errors_that_cannot_travel(ranks1):
    with pytest.raises(StageFailed, match="Odd: 1") as caught:
        ranks1.run(fault_jobs.raises_what_cannot_travel)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("raise Odd(1, 2)") == 1


def test_time_is_up(ranks1):
    pids = ranks1.run(os.getpid)
    with pytest.raises(PeerLost, match=r"ranks \[0\] did not finish within 1 s and were stopped"):
        ranks1.run(fault_jobs.never_ends, timeout=1.0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
