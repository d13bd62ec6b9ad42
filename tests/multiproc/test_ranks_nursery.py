"""How ranks come to be: from one interpreter that has imported for all, and as the launcher's own children."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import psutil
import pytest

import nursery_jobs
import unlatch
from scripts import run_script, wait_until
from unlatch.errors import PeerLost
from unlatch.transport import nursery

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are forked on Linux only"),
    pytest.mark.usefixtures("cold_start"),
]


def adopts_orphans() -> bool:
    found = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(37, ctypes.byref(found), 0, 0, 0) == 0
    return bool(found.value)


def test_ranks_are_children_of_the_launcher_with_its_environment_of_now(monkeypatch):
    monkeypatch.setenv("UNLATCH_TEST_SETTING", "set just before")
    with unlatch.Ranks(3) as ranks:
        found = ranks.run(nursery_jobs.origin)
        assert found == [(os.getpid(), f"unlatch-rank-{rank}", "set just before") for rank in range(3)]
        assert [len(set(numbers)) for numbers in zip(*ranks.run(nursery_jobs.drawn), strict=True)] == [3, 3, 3]
        # Each has its own line to the launcher: one that held another's would hide its end.
        assert len(set(ranks.run(nursery_jobs.open_lines))) == 1
        # Nobody else who is orphaned comes here.
        assert not adopts_orphans()
        assert {p.pid for p in psutil.Process().children()} >= {worker.pid for worker in ranks._workers}
    assert not [worker for worker in psutil.Process().children() if worker.status() == psutil.STATUS_ZOMBIE]


def test_nothing_is_left_of_a_start_that_is_called_off():
    before = set(psutil.Process().children(recursive=True))
    ranks = unlatch.Ranks(4)
    # It imports; there are no ranks yet.
    ranks.close(force=True)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - before if "spawn_main" in str(p.cmdline())]
    assert not adopts_orphans()


def test_a_nursery_that_is_killed_is_a_loss_of_ranks():
    ranks = unlatch.Ranks(2)
    interpreter = ranks._nursery._interpreter
    assert interpreter is not None
    os.kill(interpreter.pid, signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"was killed by signal 9 \(SIGKILL\)"):
        ranks.run(os.getpid)
    assert not adopts_orphans()


def test_a_rank_that_dies_is_told_by_its_exit_code():
    with unlatch.Ranks(2) as ranks:
        ranks.run(os.getpid)
        os.kill(ranks._workers[1].pid, signal.SIGTERM)
        os.kill(ranks._workers[1].pid, signal.SIGKILL)
        wait_until(lambda: not ranks._workers[1].is_alive(), "it lives on")
        assert ranks._workers[1].exitcode == -signal.SIGKILL
        assert ranks._workers[0].is_alive()


def test_a_script_that_starts_ranks_whenever_it_is_imported_is_told(tmp_path):
    done = run_script(tmp_path, "import os\nimport unlatch\nunlatch.launch(os.getpid, 2)\n")
    assert done.returncode == 1
    assert "finished its bootstrapping phase" in done.stderr
    assert "exited with code 1" in done.stderr


def test_every_rank_has_the_main_module_for_itself(tmp_path):
    script = (
        "import os\nimport unlatch\n"
        "here = os.getpid()\n"
        "def mine():\n    return here == os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    print(unlatch.launch(mine, 2))\n"
    )
    done = run_script(tmp_path, script)
    assert done.stdout.strip() == "[True, True]", done.stderr


def test_where_nobody_can_be_adopted_every_rank_is_an_interpreter_of_its_own(monkeypatch):
    monkeypatch.setattr(nursery._adopting, "begin", lambda: False)
    with unlatch.Ranks(2) as ranks:
        assert ranks._nursery._interpreter is None
        assert [found[:2] for found in ranks.run(nursery_jobs.origin)] == [
            (os.getpid(), f"unlatch-rank-{rank}") for rank in range(2)
        ]
    assert not adopts_orphans()
