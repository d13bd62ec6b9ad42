"""Run folders read while a run writes to them, when it has ended, and when something is wrong with them."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import time

import pytest

from run_folders import add_row, begin_run, sum_up, tell
from unlatch.errors import ConfigError
from unlatch.io.run_folder import RunFolder
from unlatch.live.following import Followed


@pytest.fixture
def folder(tmp_path):
    return begin_run(tmp_path / "dtr-1", losses=12, epochs=2)


@pytest.fixture
def held(folder):
    """The folder of a run that lives."""
    with RunFolder.resume(folder):
        yield folder


def test_a_run_under_way_is_read_as_if_it_had_ended(held):
    sight = Followed(held).look()
    assert (sight.state, sight.step, sight.epoch, sight.epochs) == ("running", 12, 2, 5)
    assert sight.record.losses[-1] == (12, 2.0 / 12)
    assert sight.record.summary["accuracy"] == pytest.approx(0.7)
    assert [stage["staleness"] for stage in sight.record.summary["stages"]] == [1.0, 1.0]
    assert not sight.lanes


def test_a_run_that_has_only_begun(tmp_path):
    with RunFolder.resume(begin_run(tmp_path / "dtr-1")) as folder:
        sight = Followed(folder.path).look()
    assert (sight.state, sight.step, sight.record.losses) == ("starting", 0, ())


def test_every_look_sees_what_is_new_and_no_half_line(held):
    run = Followed(held)
    assert run.look().step == 12
    with (held / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "time": 2.0, "train/lo')
        file.flush()
        assert run.look().step == 12
        file.write('ss": 0.5}\n')
    assert run.look().record.losses[-1] == (13, 0.5)


def test_a_run_that_went_back_is_read_anew(held):
    run = Followed(held)
    run.look()
    lines = (held / "metrics.jsonl").read_text().splitlines(keepends=True)
    (held / "draft").write_text("".join(lines[:5]))
    os.replace(held / "draft", held / "metrics.jsonl")
    assert run.look().record.losses == tuple((step, 2.0 / step) for step in range(1, 6))


def test_a_loss_that_is_not_finite_is_shown(held):
    add_row(held, 13, {"train/loss": math.nan})
    assert math.isnan(Followed(held).look().record.losses[-1][1])


def test_lanes_are_what_all_ranks_tell_of(held):
    tell(held, 0, first=1000.0)
    tell(held, 1, first=1000.05)
    events = Followed(held).look().record.events
    assert {event.stage for event in events} == {0, 1}
    assert min(event.start for event in events) == 0.0
    assert max(event.end for event in events) == pytest.approx(0.19 - 0.05)


def test_lanes_stay_while_ranks_tell_of_different_times(held):
    run = Followed(held)
    tell(held, 0, first=1000.0)
    tell(held, 1, first=1000.0)
    before = run.look().record.events
    tell(held, 0, first=1001.0)
    assert run.look().record.events == before
    tell(held, 1, first=1001.0)
    assert len(run.look().record.events) == len(before)


def test_what_ranks_say_goes_before_the_last_epoch(held):
    tell(held, 0, notes=["slow"], restarts=2)
    tell(held, 1, notes=["slow", "wide"])
    sight = Followed(held).look()
    assert (sight.steps, sight.notes, sight.record.summary["restarts"]) == (100, ("slow", "wide"), 2)
    assert sight.record.summary["samples_per_second"] == 640.0


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_the_end(folder, status):
    sum_up(folder, steps=12, status=status)
    sight = Followed(folder).look()
    assert (sight.state, sight.over, sight.why) == (status, True, None)
    assert sight.record.summary["accuracy"] == 0.9


def test_the_end_is_seen_before_the_command_that_trained_has_gone(held):
    sum_up(held, steps=12)
    tell(held, 0, ended=True)
    assert Followed(held).look().state == "finished"


def test_a_run_that_is_continued_is_under_way_whatever_its_old_summary_says(held):
    sum_up(held, steps=6, status="interrupted")
    tell(held, 0)
    assert Followed(held).look().state == "running"


def test_a_continued_run_that_was_killed_is_lost_whatever_its_old_summary_says(folder):
    sum_up(folder, steps=6, status="interrupted")
    assert Followed(folder).look().state == "lost"


def test_a_run_that_was_killed_is_lost(folder):
    sight = Followed(folder).look()
    assert sight.state == "lost"
    assert "crashed or was killed" in sight.why


def test_a_run_that_failed_says_why_and_by_whose_fault(folder):
    tell(folder, 0, error="PeerLost: rank 1 stopped", ended=True)
    tell(folder, 1, error="StageFailed: forward of batch 3 raised", ended=True)
    sight = Followed(folder).look()
    assert (sight.state, sight.why) == ("lost", "rank 1: StageFailed: forward of batch 3 raised")


def test_a_run_that_is_started_anew_after_a_failure_goes_on(held):
    tell(held, 0, error="PeerLost: rank 1 stopped", ended=True)
    sight = Followed(held).look()
    assert sight.state == "running"
    assert sight.why.startswith("rank 0: PeerLost: rank 1 stopped; ")
    tell(held, 0, restarts=1)
    assert Followed(held).look().why is None


def test_a_run_that_is_silent_is_worth_a_word(held):
    tell(held, 0, time=time.time() - 100)
    sight = Followed(held).look()
    assert sight.state == "running"
    assert re.match(r"nothing was heard of it for 1\d\d s", sight.why)


def test_a_run_that_is_deleted_while_it_is_shown(folder):
    run = Followed(folder)
    run.look()
    shutil.rmtree(folder)
    sight = run.look()
    assert (sight.state, sight.why) == ("gone", "its folder is no longer there")
    assert sight.record.losses, "what was seen of it stays"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", "garbage\n", "metrics.jsonl, line 15"),
        ("summary.json", "{", "is not JSON"),
        ("live/rank0.json", '{"rank": "x"}', "rank0.json"),
    ],
)
def test_a_file_that_was_edited_is_named_and_what_was_seen_stays(held, name, text, said):
    tell(held, 1)
    run = Followed(held)
    run.look()
    with (held / name).open("a") as file:
        file.write(text)
    sight = run.look()
    assert sight.state == "unreadable"
    assert said in sight.why
    assert sight.record.losses


def test_where_locks_are_unknown_signs_of_life_count(folder, monkeypatch):
    monkeypatch.setattr("unlatch.live.following.is_held", lambda path: None)
    tell(folder, 0)
    assert Followed(folder).look().state == "running"
    for file in (folder / "live" / "rank0.json", folder / "metrics.jsonl", folder):
        os.utime(file, (1e9, 1e9))
    assert Followed(folder).look().state == "lost"


def test_looking_does_not_keep_a_run_from_its_folder(folder, monkeypatch):
    looking = os.open(folder, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            os.close(looking)

    monkeypatch.setattr("unlatch.io.run_folder.time.sleep", nap)
    RunFolder.resume(folder).release()
    assert len(naps) == 3


@pytest.mark.parametrize("inside", [{}, {"other.txt": "x"}])
def test_a_folder_that_is_no_run_is_refused(tmp_path, inside):
    for name, text in inside.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="no run there"):
        Followed(tmp_path)


def test_many_losses_become_few(held):
    with (held / "metrics.jsonl").open("a") as file:
        for step in range(13, 10_001):
            file.write(json.dumps({"step": step, "time": 3.0, "train/loss": 1.0}) + "\n")
    losses = Followed(held).look().record.losses
    assert 2000 < len(losses) <= 4000
    assert losses[-1] == (10_000, 1.0)
