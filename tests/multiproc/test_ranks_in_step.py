"""Every method of a run is called on every rank: what happens where it is not, and where nobody closes a run."""

from __future__ import annotations

import pytest

import call_jobs
from scripts import TORCHRUN, run_script
from unlatch.errors import PeerLost

#: Seconds until it is named, on a busy machine.
BOUND = 30.0
REST = ["step", "flush", "evaluate"]


@pytest.mark.parametrize("what", ["save", "evaluate", "module", "statistics", "flush", "fit"])
@pytest.mark.parametrize("on", [0, 1])
def test_what_one_rank_alone_calls_is_named(ranks2, tmp_path, what, on):
    """It was a silent hang, or a rank that was "killed or crashed"."""
    made = {on: [what, *REST], 1 - on: REST}
    for seconds, text in ranks2.run(call_jobs.calls_differ, made, str(tmp_path)):
        assert f"{what} is called on every rank: rank {on} (stage {on}) called it, rank {1 - on} (stage" in text
        assert "called step instead" in text
        assert seconds < BOUND


@pytest.mark.parametrize("more", [0, 1])
def test_steps_that_are_not_equally_many_are_named(ranks2, tmp_path, more):
    made = {more: ["step", *REST], 1 - more: REST}
    for seconds, text in ranks2.run(call_jobs.calls_differ, made, str(tmp_path)):
        assert f"rank {more} (stage {more}) called step" in text
        assert seconds < BOUND


def test_exchanges_that_would_meet_those_of_another_method(ranks2, tmp_path):
    """The statistics of one rank arrived as the weights of another."""
    made = {0: ["module"], 1: ["statistics"]}
    for _, text in ranks2.run(call_jobs.calls_differ, made, str(tmp_path)):
        assert "is called on every rank" in text


@pytest.mark.parametrize("what", ["module", "step"])
def test_a_rank_whose_job_has_ended_is_named_by_those_who_wait_for_it(ranks2, tmp_path, what):
    """It lives on as a process, so nobody missed it."""
    with pytest.raises(PeerLost, match=r"rank 1 \(stage 1\) has closed its run while rank 0 still waits"):
        ranks2.run(call_jobs.leaves_open, {0: ["step", "flush", *[what] * 3], 1: ["step", "flush"]}, str(tmp_path))


def test_calls_that_take_long_are_not_out_of_step(ranks2, tmp_path):
    """One rank is busy between calls for longer than it takes to name a difference, and the other one waits."""
    assert ranks2.run(call_jobs.is_busy_between_calls) == [None, None]


def test_programs_that_do_not_close_their_run_end_well(tmp_path):
    """Most were aborted after they had printed their results: "terminate called without an active exception"."""
    done = run_script(
        tmp_path,
        "import call_jobs\n"
        "for what in ['trains'] * 5 + ['saves']:\n"
        "    assert call_jobs.fork_ranks(what) == [0, 0], what\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") == 10
    assert "terminate" not in done.stderr
    assert len(list(tmp_path.glob("checkpoint*"))) == 1


def test_programs_that_fail_after_training_tell_the_others(tmp_path):
    done = run_script(
        tmp_path,
        "import call_jobs\n"
        "for _ in range(2):\n"
        "    codes = call_jobs.fork_ranks('raises')\n"
        "    assert codes == [1, 1], codes\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("PeerLost: rank 1 (stage 1) stopped: a mistake after training") == 2
    assert "terminate" not in done.stderr


def test_torchrun_without_closing(tmp_path):
    done = run_script(tmp_path, "import call_jobs\ncall_jobs.program('trains')\n", *TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") == 2


def test_torchrun_with_an_exception_names_the_one_at_fault(tmp_path):
    done = run_script(tmp_path, "import call_jobs\ncall_jobs.program('raises')\n", *TORCHRUN)
    assert done.returncode == 1
    assert "terminate" not in done.stderr
    cause = done.stderr.split("Root Cause (first observed failure)")[1]
    assert "rank      : 1" in cause
    assert "exitcode  : 1 " in cause
