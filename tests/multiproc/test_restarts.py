"""Ranks that are started anew: after what, how often, and when it is no use."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket

import psutil
import pytest
import torch

import unlatch
from rank_jobs import differences
from restart_jobs import fails, session
from scripts import PATIENCE, TORCHRUN, environment, run_script
from unlatch.errors import ConfigError, NoProgress, PeerLost, StageFailed


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "unlatch"]


@pytest.fixture(autouse=True)
def _heard(caplog):
    caplog.set_level(logging.WARNING, "unlatch")


def test_a_rank_that_is_killed_and_one_that_raises(caplog):
    """Restarts are counted for each job; the ranks of the last one stay."""
    with unlatch.Ranks(2, max_restarts=2) as ranks:
        before = ranks.run(os.getpid)
        assert ranks.run(fails, "kill", 2, [5, 7, 9]) == [(2, [0, 1])] * 2
        between = ranks.run(os.getpid)
        assert ranks.run(fails, "raise", 1, []) == [(1, [0, 1])] * 2
        assert not set(before) & set(between) & set(ranks.run(os.getpid))
        assert not any(psutil.pid_exists(pid) for pid in before + between)
    killed = (
        "PeerLost: rank 1 was killed by signal 9 (SIGKILL); if nobody did that, the system may have, for lack of memory"
    )
    assert said(caplog) == [
        f"restart 1 of 2: {killed}; the last checkpoint is that of step 5",
        f"restart 2 of 2: {killed}; the last checkpoint is that of step 7",
        "restart 1 of 2: StageFailed: rank 1 raised OSError: the disk is gone; there is no checkpoint yet",
    ]


@pytest.mark.parametrize(
    ("saves", "where"),
    [
        ([], "2 attempts in a row failed before a checkpoint was written"),
        ([5, 8, 8], "2 attempts in a row failed with none newer than step 8"),
        ([5, 8, 3], "2 attempts in a row failed with none newer than step 8"),
    ],
)
def test_a_loop_without_progress_ends(saves, where):
    with pytest.raises(NoProgress) as caught:
        unlatch.launch(fails, 2, args=("raise", 9, saves), max_restarts=9)
    assert where in str(caught.value)
    assert str(caught.value).endswith("The first cause was: StageFailed: rank 1 raised OSError: the disk is gone")
    assert isinstance(caught.value.__cause__, StageFailed)


def test_as_often_as_allowed():
    with pytest.raises(PeerLost, match="rank 1 was killed by signal 9") as caught:
        unlatch.launch(fails, 2, args=("kill", 9, [5, 8, 9]), max_restarts=1)
    assert caught.value.__notes__ == ["The ranks had been started anew 1 time(s), as often as max_restarts allows."]


@pytest.mark.parametrize(("what", "kind"), [("settings", ConfigError), ("exit", StageFailed)])
def test_what_would_come_again_is_raised_at_once(caplog, what, kind):
    with pytest.raises(kind):
        unlatch.launch(fails, 2, args=(what, 9, []), max_restarts=9)
    assert said(caplog) == []


def test_a_rank_lost_while_it_starts(tmp_path):
    done = run_script(
        tmp_path,
        "import os, pathlib, sys\nimport restart_jobs, unlatch\n"
        "mark = pathlib.Path(sys.argv[1], 'mark')\n"
        "if __name__ == '__main__':\n"
        "    print(unlatch.launch(restart_jobs.fails, 2, args=('', 0, []), max_restarts=1))\n"
        "elif not mark.exists():\n"
        "    mark.touch()\n"
        "    os._exit(7)\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(1, [0, 1]), (1, [0, 1])]\n"
    assert "restart 1 of 1: PeerLost: rank" in done.stderr
    assert "exited with code 7" in done.stderr


def test_a_rank_that_never_comes_is_named(tmp_path):
    done = run_script(
        tmp_path,
        "import os, signal, sys\nimport restart_jobs, unlatch\n"
        "if __name__ == '__main__':\n"
        "    with unlatch.Ranks(2, start_limit=1.0) as ranks:\n"
        "        os.kill(ranks._workers[1].pid, signal.SIGSTOP)\n"
        "        ranks.run(restart_jobs.fails, '', 0, [])\n",
    )
    assert done.returncode == 1
    assert "PeerLost: rank 1 (starting) did not come within 1 s" in done.stderr


def test_a_negative_number_of_restarts():
    with pytest.raises(ConfigError, match="max_restarts must be 0 or more, got -1"):
        unlatch.launch(os.getpid, 1, max_restarts=-1)


@pytest.mark.parametrize("method", ["bp", "dtrp", "pipedream"])
def test_a_restarted_session_ends_with_the_weights_of_an_undisturbed_one(tmp_path, method):
    expected = session(method, None)
    found = unlatch.launch(session, 2, args=(method, str(tmp_path), [8, 11]), max_restarts=2)
    assert all(differences(expected, outcome) == [] for outcome in found)


@pytest.mark.parametrize(
    "method", ["dtrp", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bp", "petra"))]
)
def test_torchrun_restarts(greenhouse, tmp_path, method):
    """The recipe of docs/deploy.md. torchrun keeps its store between starts, with all that the dead wrote there."""
    done = run_script(
        tmp_path,
        "import os, sys, torch\nfrom restart_jobs import session\n"
        "torch.set_num_threads(1)\n"
        f"found = session('{method}', os.path.join(sys.argv[1], 'checkpoints'), [8, 11])\n"
        "torch.save(found, os.path.join(sys.argv[1], os.environ['RANK']))\n",
        *TORCHRUN,
        "--max-restarts",
        "2",
        greenhouse=greenhouse,
    )
    assert done.returncode == 0, done.stderr
    check_weights(tmp_path, method)


def test_agents_of_torchrun_that_count_restarts_differently(greenhouse, tmp_path):
    """Only the agent of the rank that was lost counts; the other one starts its rank anew all the same."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, torch\nfrom restart_jobs import session\n"
        "torch.set_num_threads(1)\n"
        "folder, rank = pathlib.Path(sys.argv[1]), os.environ['RANK']\n"
        "count = folder / f'count{rank}'\n"
        "kills = [] if count.exists() else [8]\n"
        "count.open('a').write(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "os.environ['UNLATCH_RESTARTS'] = '0'\n"
        "torch.save(session('dtrp', str(folder / 'checkpoints'), kills), folder / rank)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "test"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *meeting]
    command = ["-m", "torch.distributed.run", *options, str(script), str(tmp_path)]
    said = tmp_path / "said"
    with said.open("w") as file:
        agents = [greenhouse.program(command, environment(), 1, file.fileno()) for _ in range(2)]
    try:
        for agent in agents:
            assert agent.wait(PATIENCE) == 0, said.read_text()
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    # Unless the other rank noticed the loss before its agent did: then both count.
    counts = sorted((tmp_path / f"count{rank}").read_text() for rank in range(2))
    assert counts in (["00", "01"], ["01", "01"])
    check_weights(tmp_path, "dtrp")


def check_weights(tmp_path, method):
    expected = session(method, None)
    for rank in range(2):
        assert differences(expected, torch.load(tmp_path / str(rank))) == []
