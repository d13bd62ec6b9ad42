"""Tensors on groups of their own, one per direction of every pair of neighbours: all that `"nccl"` does, on CPUs.

The groups are of gloo here, and real ranks use them; NCCL itself needs devices that nobody has tried.
"""

from __future__ import annotations

import json
import os
import re
import time
from functools import cache, partial

import psutil
import pytest

import fault_jobs
import lane_jobs
import rank_jobs
import resume_jobs
import unlatch
from fault_jobs import LIMIT
from order_jobs import begun
from rank_jobs import differences
from unlatch import Faults
from unlatch.errors import ConfigError, PeerLost, TransportError
from unlatch.transport import launch
from unlatch.transport.lanes import BACKENDS, Backend, check_transport

#: One of every kind of order, station and message.
METHODS = ("bp", "1f1b", "zb-h1", "pipedream", "dtr", "dtrp", "petra", "dgl", "layerpipe", "auxnet")
#: Seconds until survivors know of a death. It takes tenths; a busy machine may take its time.
SOON = 10.0


@cache
def inline(method: str, stages: int, **options: str) -> rank_jobs.Outcome:
    return rank_jobs.train_conv(method, stages, **options)


def check(pool, methods, stages):
    """With a short last batch, and evaluations between steps."""
    for rank, (found, sent) in enumerate(pool.run(lane_jobs.train_conv, methods, stages)):
        assert sent > 0
        for method in methods:
            assert differences(inline(method, stages), found[method]) == [], f"{method}, rank {rank}, {stages} stages"


@pytest.mark.parametrize("stages", [2, 3])
def test_two_ranks_are_inline_bit_for_bit(ranks2, stages):
    check(ranks2, METHODS, stages)


def test_four_ranks_are_inline_bit_for_bit(ranks4):
    check(ranks4, ("1f1b", "pipedream", "dtr", "petra", "layerpipe"), 4)


def test_rounded_messages(ranks2):
    expected = inline("pipedream", 2, messages="int8")
    for found, _ in ranks2.run(partial(lane_jobs.train_conv, messages="int8"), ("pipedream",), 2):
        assert differences(expected, found["pipedream"]) == []


def test_replicas(ranks4):
    """They send each other gradients, over lanes too."""
    expected = rank_jobs.train_conv("1f1b", 2, replicas=2)
    for found, sent in ranks4.run(partial(lane_jobs.train_conv, replicas=2), ("1f1b",), 2):
        assert sent > 0
        assert differences(expected, found["1f1b"]) == []


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "dtrp"])
def test_replicas_whose_gradients_travel_in_parts(ranks4, method):
    """The first of them while the backward goes on."""
    expected = rank_jobs.train_conv(method, 2, replicas=2)
    whole, parted = (ranks4.run(lane_jobs.train_replicas, method, least) for least in (None, 64))
    for rank, ((one, messages), (other, more)) in enumerate(zip(whole, parted, strict=True)):
        assert differences(expected, one) == []
        assert differences(expected, other) == [], f"rank {rank}"
        # Nearly all gradients of the second stage are of one weight.
        assert more > messages or rank % 2 == 1


def test_layerpipe_in_stages(ranks2):
    method = unlatch.methods.get("layerpipe", mode="stages")
    expected = rank_jobs.train_conv(method, 3)
    for found, sent in ranks2.run(lane_jobs.train_conv, (method,), 3):
        assert sent > 0
        assert differences(expected, found[str(method)]) == []


def test_all_tensors_go_over_lanes_and_little_beside_them(ranks2):
    batches = 12
    for rank, (lanes, messages, sent) in enumerate(ranks2.run(lane_jobs.bytes_by_way, batches)):
        assert lanes == messages > 0
        # A header per message, two descriptions of forms.
        assert 0 < sent[rank] - lanes <= (batches + 3) * 256 + 2 * 1024


def test_every_direction_has_its_own_group_and_all_ranks_make_them_in_one_order(ranks4):
    """Also the ranks that are in none of the two: who makes them in another order waits for ever."""
    ways = [[0, 1], [1, 0], [1, 2], [2, 1], [2, 3], [3, 2]]
    for rank, (made, opened, groups) in enumerate(ranks4.run(lane_jobs.groups_made)):
        assert made == ways
        assert opened == [(a, b) for a, b in ways if rank in (a, b)]
        assert groups == len(opened)


@pytest.mark.parametrize("case", ["pipedream", "dtrp", "petra", "layerpipe stages", "1f1b"])
def test_exact_resume_with_tensors_on_their_way(ranks2, tmp_path, case):
    with begun(case, 1, distributed=False) as run:
        resume_jobs.feed(run, 0, resume_jobs.SAVED_AT)
        expected = resume_jobs.network(resume_jobs.ended(run))
    found = ranks2.run(lane_jobs.saved_and_continued, case, str(tmp_path))
    for one, other, _ in found:
        assert resume_jobs.same(one, expected)
        assert resume_jobs.same(other, expected)
    # Synchronous methods have nothing under way between steps.
    assert (sum(late for *_, late in found) > 0) == (case != "1f1b")


@pytest.mark.parametrize("method", ["1f1b", "pipedream"])
def test_a_batch_that_is_left_out(ranks2, method):
    expected = fault_jobs.leaves_out(method, None)
    for found in ranks2.run(lane_jobs.left_out, method, Faults().poison(stage=1, at=3, part="gradient")):
        assert differences(expected, found) == []


def test_a_slow_receiver_is_never_overrun(ranks2):
    few, many = (ranks2.run(lane_jobs.held_bytes, count)[0] for count in (10, 60))
    assert few == many


def test_nothing_is_left_of_a_run_that_closed(ranks2):
    assert ranks2.run(lane_jobs.threads_afterwards) == [set(), set()]
    # The next one makes its own groups.
    assert ranks2.run(lane_jobs.threads_afterwards) == [set(), set()]


# ----------------------------------------------------------------------------------------------------------- faults


def broken(pool, folder, method, what, at_stage, limit=fault_jobs.NEVER, kind=PeerLost):
    """The error of the run, what survivors say, and after how many seconds."""
    pids = pool.run(os.getpid)
    with pytest.raises(kind) as caught:
        pool.run(lane_jobs.breaks, method, pool.size, what, at_stage, str(folder), limit)
    began = json.loads((folder / "struck").read_text().splitlines()[0])["time"]
    reports = {
        rank: json.loads((folder / f"rank{rank}").read_text())
        for rank in range(pool.size)
        if (folder / f"rank{rank}").exists()
    }
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    return (
        str(caught.value),
        {rank: r["text"] for rank, r in reports.items()},
        [r["time"] - began for r in reports.values()],
    )


@pytest.mark.parametrize(("victim", "method"), [(0, "dtr"), (1, "pipedream")])
def test_a_rank_that_dies_is_named(ranks2, tmp_path, victim, method):
    text, reports, seconds = broken(ranks2, tmp_path, method, Faults().kill(victim, at=3), victim)
    assert f"rank {victim} was killed by signal 9 (SIGKILL)" in text
    assert reports.keys() == {1 - victim}
    assert f"rank {victim} (stage {victim})" in reports[1 - victim]
    assert max(seconds) < SOON


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_between_header_and_tensor_is_named(ranks2, tmp_path, victim):
    text, reports, seconds = broken(ranks2, tmp_path, "dtr", "SIGKILL", victim)
    assert f"rank {victim} was killed by signal 9 (SIGKILL)" in text
    assert re.match(rf"PeerLost: rank {victim} \(stage {victim}\) ", reports[1 - victim])
    assert max(seconds) < SOON


def test_a_rank_that_dies_while_groups_are_made_is_named(ranks2, tmp_path):
    with pytest.raises(PeerLost, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        ranks2.run(lane_jobs.dies_at_the_start, str(tmp_path))
    assert (tmp_path / "seen").read_text().startswith("PeerLost: rank 1 ")


def test_a_rank_that_stops_between_header_and_tensor_is_named(ranks2, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE", 0.5)
    began = time.monotonic()
    text, _, seconds = broken(ranks2, tmp_path, "dtr", "SIGSTOP", 0, LIMIT)
    assert f"rank 0 (stage 0) gave no sign of life for {LIMIT:g} s" in text
    assert max(seconds) < LIMIT + SOON
    # Nobody waits on for a tensor that will not come.
    assert time.monotonic() - began < LIMIT + 3 * SOON


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        (Faults().drop(1, 4), "message 5 came from rank 0 where 4 was due"),
        (Faults().duplicate(1, 4), "message 4 came from rank 0 where 5 was due"),
        (Faults().corrupt(1, 4, part="header"), "does not match its checksum"),
    ],
    ids=["lost", "doubled", "damaged"],
)
def test_wrong_messages_are_refused_before_their_tensors_are_asked_for(ranks2, tmp_path, faults, text):
    error, reports, seconds = broken(ranks2, tmp_path, "pipedream", faults, 1, kind=TransportError)
    assert text in error
    assert reports[1].startswith("TransportError: ")
    assert reports[0].startswith("PeerLost: rank 1 (stage 1) stopped: ")
    assert max(seconds) < SOON


# ---------------------------------------------------------------------------------------------------------- refused


def test_what_cannot_be_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match='transport must be "auto", "gloo" or "nccl", got \'tcp\''):
        fault_jobs.start("dtr", 2, transport="tcp")
    with pytest.raises(ConfigError, match=r"one cuda device to another, and this run computes on cpu: leave transport"):
        fault_jobs.start("dtr", 2, transport="nccl")
    # Torch is of the CPU here.
    monkeypatch.setitem(BACKENDS, "nccl", Backend("nccl", "cpu"))
    with pytest.raises(ConfigError, match=r"torch 2\S+ was built without nccl: install a build"):
        check_transport("nccl", "cpu")


def test_ranks_must_agree_on_it(ranks2):
    for report in ranks2.run(fault_jobs.reported, lane_jobs.disagrees):
        assert report.startswith("ConfigError: ranks ")
        assert "disagree on transport: " in report
