"""Starting and ending: the launcher, torchrun, scripts, and launchers that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

import unlatch
from rank_jobs import differences, train_conv
from scripts import PATIENCE, TORCHRUN, environment, run_python, run_script, runs, wait_until


def test_torchrun(tmp_path):
    done = run_script(
        tmp_path,
        "import os, sys, torch\n"
        "from rank_jobs import train_conv\n"
        "torch.set_num_threads(1)\n"
        "found = train_conv('dtrp', 3)\n"
        "torch.save(found, os.path.join(sys.argv[1], os.environ['RANK']))\n",
        *TORCHRUN,
    )
    assert done.returncode == 0, done.stderr
    expected = train_conv("dtrp", 3)
    for rank in range(2):
        assert differences(expected, torch.load(tmp_path / str(rank))) == []


def test_torchrun_with_a_failing_stage(greenhouse, tmp_path):
    done = run_script(
        tmp_path,
        "import signal, sys\nimport fault_jobs\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others before they can report\n"
        "fault_jobs.breaks('dtr', 2, 'forward', 1, sys.argv[1])\n",
        *TORCHRUN,
        greenhouse=greenhouse,
    )
    assert done.returncode != 0
    assert done.stderr.count('raise ValueError("boom in forward")') == 1
    assert json.loads((tmp_path / "rank0").read_text())["text"].startswith("PeerLost: rank 1 (stage 1) stopped:")


def test_a_script_that_fails_exits_with_an_error_and_one_traceback(greenhouse, tmp_path):
    done = run_script(
        tmp_path,
        "import sys\nimport fault_jobs, unlatch\n"
        "if __name__ == '__main__':\n"
        "    unlatch.launch(fault_jobs.breaks, 2, args=('dtr', 2, 'backward', 0, sys.argv[1]))\n",
        greenhouse=greenhouse,
    )
    assert done.returncode == 1
    assert done.stderr.count('raise ValueError("boom in backward")') == 1
    assert "stage 0 failed in the backward of batch" in done.stderr


NOTEBOOK = """
import unlatch
from dataclasses import dataclass

class Mistake(Exception):
    def __init__(self, rank, more):
        super().__init__(rank)

@dataclass
class Found:
    value: object

offset = 40

def here(x):
    return Found(x + offset)

def fails():
    raise Mistake(0, "more")

def inner(scale):
    def closure(x):
        return scale * x
    return closure

with unlatch.Ranks(1) as ranks:
    [found] = ranks.run(here, 2)
    assert isinstance(found, Found) and found.value == 42, found
    assert ranks.run(lambda x: x * offset, 2) == [80]
    assert ranks.run(inner(3), 5) == [15]
    [doubled] = ranks.run(inner, 2)
    assert doubled(4) == 8
    try:
        ranks.run(fails)
    except unlatch.errors.StageFailed as error:
        print(error)
"""


def test_functions_classes_and_errors_of_a_notebook(tmp_path):
    """What exists in this process only: code on standard input or in cells, lambdas, functions in functions."""
    pytest.importorskip("cloudpickle", reason="the extra notebook is not installed")
    done = subprocess.run([sys.executable], input=NOTEBOOK, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # It cannot be made again from its arguments, so its text has to do.
    assert "Mistake: 0" in done.stdout


def test_without_the_extra_it_is_named():
    refused = "import sys\nsys.modules['cloudpickle'] = None\nimport unlatch\ndef f(): pass\n"
    done = run_python("-c", refused + "import os\nprint(len(unlatch.launch(os.getcwd, 1)))\nunlatch.launch(f, 1)")
    assert done.stdout == "1\n"
    assert done.returncode == 1
    assert "unlatch[notebook]" in done.stderr


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_launcher_that_is_ended(tmp_path, how, code):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys\nimport fault_jobs, unlatch\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts without it\n"
        "    unlatch.launch(fault_jobs.train_forever, 2, args=(sys.argv[1],))\n"
    )
    command = [sys.executable, str(script), str(tmp_path)]
    launcher = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL)
    notes = [tmp_path / "pid0", tmp_path / "pid1"]
    try:
        wait_until(lambda: all(note.exists() for note in notes), "training does not begin")
        pids = [int(note.read_text()) for note in notes]
        assert all(runs(pid) for pid in pids)
        launcher.send_signal(how)
        launcher.wait(PATIENCE)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == code
    wait_until(lambda: not any(runs(pid) for pid in pids), "ranks outlive their launcher")


def test_launch_ends_what_it_started():
    [pid] = unlatch.launch(os.getpid, 1)
    assert pid != os.getpid()
    assert not psutil.pid_exists(pid)


def test_no_ranks():
    with pytest.raises(unlatch.errors.ConfigError, match="at least 1 process, got 0"):
        unlatch.launch(os.getpid, 0)
