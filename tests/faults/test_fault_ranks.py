"""A dead, stuck or wrong rank ends the run, with the culprit's name, and nothing is left behind.

What ends a run here is the event itself: ranks that only ran out of patience would outlast the timeout of every test.
"""

from __future__ import annotations

import json
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
import unlatch
from fault_jobs import LIMIT
from rank_jobs import differences
from unlatch import Faults
from unlatch.errors import ConfigError, PeerLost, StageFailed, TransportError, UnlatchError
from unlatch.transport import launch

#: Seconds until survivors know of a death. It takes tenths; a busy machine may take its time.
SOON = 10.0
EVERY_KIND = ["bp", "1f1b", "pipedream", "dtrp", "petra", "layerpipe", "auxnet"]


@pytest.fixture
def hasty(monkeypatch):
    """The launcher does not wait for a rank that was stopped: it has nothing more to say."""
    monkeypatch.setattr(launch, "_GRACE", 0.5)


def shared_memory(pids: list[int]) -> set[str]:
    """What these processes left there; others come and go as they like."""
    own = tuple(f"torch_{pid}_" for pid in pids)
    return {path.name for path in Path("/dev/shm").glob("*") if path.name.startswith((*own, "gloo", "unlatch"))}


def listening(pid: int | None = None) -> set[int]:
    """Ports on which a process, or this one, waits for connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


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
        self.reports, self.seconds = {}, 0.0
        struck = json.loads((self.folder / "struck").read_text().splitlines()[0])["time"]
        for rank in range(self.pool.size):
            if (self.folder / f"rank{rank}").exists():
                report = json.loads((self.folder / f"rank{rank}").read_text())
                self.reports[rank] = report["text"]
                self.seconds = max(self.seconds, report["time"] - struck)
        assert not [pid for pid in self.pids if psutil.pid_exists(pid)]
        assert shared_memory(self.pids) <= before
        return caught.value


@pytest.mark.parametrize(("what", "at_stage"), [("forward", 0), ("backward", 1), ("loss", 1), ("optimizer", 0)])
def test_user_code_that_raises(row, ranks2, tmp_path, what, at_stage):
    line = row("F2", f"user code raises in {what}, stage {at_stage} of 2")
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
    assert wreck.seconds < SOON
    line.found("StageFailed with the user's traceback once; PeerLost quotes it elsewhere", wreck.seconds)


def _killed(line, pool, folder, method, victim):
    wreck = Wreck(pool, folder)
    error = wreck.run(PeerLost, method, Faults().kill(victim, at=3), victim)
    assert f"rank {victim} was killed by signal 9 (SIGKILL)" in str(error)
    assert wreck.reports.keys() == set(range(wreck.pool.size)) - {victim}
    for report in wreck.reports.values():
        assert report.startswith("PeerLost: ")
        assert f"rank {victim} (stage {victim})" in report
    assert wreck.seconds < SOON
    line.found("PeerLost names rank and stage on every survivor; nothing left behind", wreck.seconds)


@pytest.mark.parametrize(("pool", "victim"), [("ranks2", 0), ("ranks2", 1), ("ranks4", 1)])
def test_killed_rank(row, request, tmp_path, pool, victim):
    """The first, the last, or one between, of whom the farthest rank hears through its neighbour."""
    ranks = request.getfixturevalue(pool)
    _killed(row("F1", f"SIGKILL of stage {victim} of {ranks.size}, dtr"), ranks, tmp_path, "dtr", victim)


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("method", EVERY_KIND)
def test_killed_rank_under_every_kind_of_method(row, ranks2, tmp_path, method, victim):
    _killed(row("F1", f"SIGKILL of stage {victim} of 2, {method}"), ranks2, tmp_path, method, victim)


def test_rank_that_exits(row, ranks2, tmp_path):
    line = row("F1", "stage 1 of 2 leaves by exit(3), pipedream")
    wreck = Wreck(ranks2, tmp_path)
    assert "rank 1 " in str(wreck.run(PeerLost, "pipedream", "exit", 1))
    assert "rank 1 (stage 1) is gone without a word" in wreck.reports[0]
    assert wreck.seconds < SOON
    line.found("PeerLost: gone without a word", wreck.seconds)


def test_stopped_rank(row, ranks2, hasty, tmp_path):
    line = row("F3", f"SIGSTOP of stage 1 for good, stall_limit {LIMIT:g} s")
    wreck = Wreck(ranks2, tmp_path)
    error = wreck.run(PeerLost, "dtr", Faults().stall(1, at=2), 1, limit=LIMIT)
    assert f"rank 1 (stage 1) gave no sign of life for {LIMIT:g} s" in str(error)
    assert "stall_limit" in str(error)
    # The last sign of life may be half a second older than the stop.
    assert LIMIT - 1.0 < wreck.seconds < LIMIT + SOON
    line.found("PeerLost: no sign of life", wreck.seconds)


@pytest.mark.parametrize(
    ("what", "text"),
    [("kill", "rank 1 was killed by signal 9"), ("stop", f"rank 1 (stage 1) gave no sign of life for {LIMIT:g} s")],
)
def test_rank_lost_while_the_others_wait_for_all(row, ranks2, request, what, text):
    line = row("F1" if what == "kill" else "F3", f"{what} of rank 1 while rank 0 gathers weights")
    if what == "stop":
        request.getfixturevalue("hasty")
    pids = ranks2.run(os.getpid)
    with pytest.raises(PeerLost) as caught:
        ranks2.run(fault_jobs.breaks_between_steps, what)
    assert text in str(caught.value)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    line.found("PeerLost names it")


def _unchanged(ranks, method, faults, limit=fault_jobs.NEVER):
    """The run of all ranks is the undisturbed one, bit for bit."""
    expected = fault_jobs.survives(method, ranks.size)
    for outcome in ranks.run(fault_jobs.survives, method, ranks.size, faults, limit):
        assert differences(expected, outcome) == []


def test_short_pause_changes_nothing(row, ranks2):
    line = row("F3", "SIGSTOP of stage 1 for 1 s, stall_limit never reached")
    _unchanged(ranks2, "dtrp", Faults().stall(1, at=2, seconds=1.0))
    line.found("goes on; weights bit for bit")


@pytest.mark.parametrize("method", ["bp", "pipedream"])
@pytest.mark.parametrize("slow", [0, 1])
def test_slow_stage_changes_nothing(row, ranks2, slow, method):
    line = row("F4", f"stage {slow} is slow, {method}")
    _unchanged(ranks2, method, Faults().delay(slow, ms=20, during="forward"))
    line.found("goes on; weights bit for bit")


def test_slow_stage_is_seen_in_the_statistics(row, ranks2):
    line = row("F4", "stage 1 is slow: what the statistics say")
    faults = Faults().delay(1, ms=20)
    for bubbles in ranks2.run(fault_jobs.bubbles, "pipedream", faults):
        assert bubbles[0] > 0.5 > bubbles[1]
    line.found(f"bubble of stage 0 {bubbles[0]:.0%}, of stage 1 {bubbles[1]:.0%}")


def test_slow_receiver_is_never_overrun(row, ranks2):
    line = row("F19", "stage 1 is slow, and so are its messages: what waits for it")
    faults = Faults().delay(1, ms=5).delay(0, ms=2, message="backward", jitter=True)
    few, many = (ranks2.run(fault_jobs.held_bytes, "pipedream", faults, count)[0] for count in (10, 60))
    assert few == many
    line.found(f"in flight {[in_flight for in_flight, _ in many]}, the same after 10 and after 60 batches")


@pytest.mark.parametrize(
    ("faults", "stage", "text", "size"),
    [
        pytest.param(Faults().corrupt(1, 4), 1, "does not match its checksum", 300, id="damaged"),
        pytest.param(Faults().drop(1, 4), 1, "message 5 came from rank 0 where 4 was due", 6, id="lost"),
        *(
            pytest.param(*case, size, marks=pytest.mark.thorough)
            for size in (6, 300)
            for case in (
                (Faults().corrupt(1, 4, part="header"), 1, "checksum"),
                (Faults().corrupt(0, 4, message="backward"), 0, "checksum"),
                (Faults().drop(0, 4, message="backward"), 0, "message 5 came from rank 1 where 4 was due"),
                (Faults().duplicate(1, 4), 1, "message 4 came from rank 0 where 5 was due"),
                (Faults().reorder(1, 4), 1, "message 5 came from rank 0 where 4 was due"),
            )
        ),
    ],
)
def test_wrong_messages(row, ranks2, tmp_path, faults, stage, text, size):
    line = row("F18", f"{next(iter(faults))}, {'large' if size > 6 else 'small'} tensors")
    wreck = Wreck(ranks2, tmp_path)
    error = wreck.run(TransportError, "pipedream", faults, stage, limit=fault_jobs.NEVER, size=size)
    assert text in str(error)
    assert wreck.reports[stage].startswith("TransportError: ")
    assert wreck.reports[1 - stage].startswith(f"PeerLost: rank {stage} (stage {stage}) stopped: ")
    assert wreck.seconds < SOON
    line.found("TransportError; not trained on", wreck.seconds)


def test_late_messages_change_nothing(row, ranks2):
    line = row("F18", "every message between two stages is up to 5 ms late")
    late = Faults().delay(1, ms=5, message="forward", jitter=True).delay(0, ms=5, message="backward", jitter=True)
    _unchanged(ranks2, "pipedream", late)
    line.found("goes on; weights bit for bit")


def test_message_faults_that_could_not_strike(ranks2):
    for report in ranks2.run(fault_jobs.reported, fault_jobs.survives, "dtr", 2, Faults().drop(0, 3)):
        assert report.startswith("ConfigError: cannot drop the forward message for stage 0 at number 3: no 'forward'")
        assert "(backward)" in report


def test_all_suspended_at_once(row, ranks2, tmp_path):
    """A laptop that is closed: nobody is blamed when it wakes up."""
    line = row("F22", f"both ranks stopped for {2 * LIMIT:g} s, stall_limit {LIMIT:g} s")
    pids, found, path = ranks2.run(os.getpid), [], tmp_path / "under_way"
    training = threading.Thread(target=lambda: found.extend(ranks2.run(fault_jobs.sleeps_in_between, str(path), LIMIT)))
    training.start()
    while not path.exists():
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2 * LIMIT)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    training.join()
    expected = fault_jobs.survives("dtr", 2)
    assert len(found) == 2
    assert all(differences(expected, outcome) == [] for outcome in found)
    line.found("goes on; weights bit for bit")


@pytest.mark.thorough
def test_two_runs_at_once(row, ranks2):
    line = row("F17", "two runs on one machine at the same time")
    found: dict[str, list] = {}

    def second() -> None:
        found["dtr"] = unlatch.launch(fault_jobs.survives, 2, args=("dtr", 2, Faults().delay(0, ms=30)))

    other = threading.Thread(target=second)
    other.start()
    while other.is_alive():
        found["pipedream"] = ranks2.run(fault_jobs.survives, "pipedream", 2, Faults().delay(1, ms=20))
    other.join()
    for method, outcomes in found.items():
        assert all(differences(fault_jobs.survives(method, 2), outcome) == [] for outcome in outcomes)
    assert set(found) == {"dtr", "pipedream"}
    line.found("both end with their own weights")


@pytest.mark.parametrize(
    "faults",
    [
        Faults().kill(1, 3),
        pytest.param(Faults().fail(0, 3), marks=pytest.mark.thorough),
        pytest.param(Faults().corrupt(1, 3), marks=pytest.mark.thorough),
    ],
    ids=["killed", "failed", "damaged"],
)
def test_nothing_is_left_behind(row, tmp_path, faults):
    line = row("F25", f"what is left after: {next(iter(faults))}")
    own = psutil.Process()
    children, ports, shared = set(own.children(True)), listening(), set(os.listdir("/dev/shm"))
    with pytest.raises(UnlatchError):
        unlatch.launch(fault_jobs.breaks, 2, args=("dtr", 2, faults, 1, str(tmp_path)))
    assert set(own.children(True)) <= children
    assert listening() <= ports
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith(("torch_", "gloo", "unlatch"))}
    line.found("no process, no listening port, no shared memory")


@pytest.mark.parametrize("method", ["bp", "dtrp"])
def test_loss_that_is_not_a_number(row, ranks2, method):
    line = row("F13", f"NaN in the input of stage 1, {method}")
    below, above = ranks2.run(fault_jobs.reported, fault_jobs.becomes_nan, method)
    assert above.startswith("NonFiniteLoss: the loss of batch 2")
    assert "is nan (stage 1, after 2 updates, lr 0.1). Lower the learning rate, clip gradients" in above
    assert below.startswith("PeerLost: rank 1 (stage 1) stopped: the loss of batch 2")
    line.found("NonFiniteLoss names stage, batch, update and learning rate; PeerLost quotes it")


@pytest.mark.parametrize("method", ["1f1b", "pipedream"])
def test_gradient_that_is_infinite(row, ranks2, method):
    faults = Faults().poison(stage=0, at=2, part="gradient", value="inf")
    line = row("F13", f"{next(iter(faults))}, {method}")
    below, above = ranks2.run(fault_jobs.reported, fault_jobs.becomes_nan, method, faults)
    assert re.match(
        r"NonFinite: the gradient of 0\.\S+ is not finite in batch 2 \(stage 0, after 2 updates, lr 0\.1\)", below
    )
    assert above.startswith("PeerLost: rank 0 (stage 0) stopped: the gradient of 0.")
    line.found("NonFinite names gradient, stage and batch before it is applied; PeerLost quotes it")


@pytest.mark.parametrize("part", ["input", "gradient", "weight"])
@pytest.mark.parametrize("method", ["1f1b", "pipedream"])
def test_not_finite_and_left_out(row, ranks2, method, part):
    faults = Faults().poison(stage=1, at=3, part=part)
    line = row("F13", f"{next(iter(faults))}, {method}, left out")
    expected = fault_jobs.leaves_out(method, None)
    for found in ranks2.run(fault_jobs.leaves_out, method, faults):
        assert differences(expected, found) == []
    line.found("goes on without the batch; weights bit for bit those of a run that never had it")


def test_wrong_batch_is_refused_before_anything_is_sent(row, ranks2):
    line = row("F12", "fewer targets than samples")
    below, above = ranks2.run(fault_jobs.reported, fault_jobs.bad_batch)
    assert below.startswith("ShapeMismatch: every tensor of a batch must have the same number of samples")
    assert above.startswith("PeerLost: rank 0 (stage 0) stopped: every tensor of a batch")
    line.found("ShapeMismatch before anything is sent; PeerLost quotes it")


def test_data_loader_that_raises(row, ranks2):
    line = row("F14", "the loader raises OSError after 3 batches")
    pids = ranks2.run(os.getpid)
    with pytest.raises(UnlatchError, match="rank 0 raised OSError: the disk is gone"):
        ranks2.run(fault_jobs.loader_breaks)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    line.found("its own error, with rank")


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
def test_ranks_that_disagree(row, ranks2, what, named):
    line = row("F15", f"ranks with another {named}")
    reports = ranks2.run(fault_jobs.reported, fault_jobs.disagree, what)
    for rank, report in enumerate(reports):
        assert report.startswith(f"ConfigError: ranks {rank} and {1 - rank} disagree on {named}: "), report
    line.found("ConfigError names both ranks and the difference")


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
def test_ranks_with_different_numbers_of_batches(row, ranks2, steps, waiting, method):
    line = row("F14", f"ranks with {steps[0]} and {steps[1]} batches, {method}")
    reports = ranks2.run(fault_jobs.stops_early, steps, method)
    assert reports[1 - waiting] == "no error"
    assert reports[waiting].startswith(f"PeerLost: rank {1 - waiting} (stage {1 - waiting}) has closed its run")
    line.found("PeerLost names who closed")


def test_results_that_cannot_travel(ranks1):
    with pytest.raises(ConfigError, match="cannot be sent back"):
        ranks1.run(fault_jobs.returns_what_cannot_travel)


def test_errors_that_cannot_travel(ranks1):
    with pytest.raises(StageFailed, match="Odd: 1") as caught:
        ranks1.run(fault_jobs.raises_what_cannot_travel)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("raise Odd(1, 2)") == 1


def test_time_is_up(row, ranks1):
    line = row("F3", "user code in an endless loop, launch(timeout=1)")
    pids = ranks1.run(os.getpid)
    with pytest.raises(PeerLost, match=r"ranks \[0\] did not finish within 1 s and were stopped"):
        ranks1.run(fault_jobs.never_ends, timeout=1.0)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    line.found("PeerLost names the ranks that did not finish")
