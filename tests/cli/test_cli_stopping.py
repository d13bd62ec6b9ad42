"""Ctrl-C: the batch under way is finished, a checkpoint is left, and the continued run is the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import unlatch as package
from unlatch.cli.stopping import stop_file, stopping_on_signals
from unlatch.io import metrics

SOURCE = str(Path(package.__file__).parent.parent)
CONSTANT = ["--set", "schedule.name=constant", "--set", "optimizer.lr=0.05"]
#: Two runs measure the blocks twice, and may cut in two places unless told where.
CUT = ["--stages", 2, "--set", 'run.split=["layers.2"]']
#: Seconds for what a quiet machine does in a few.
PATIENCE = 240


def start(*arguments, launcher=("-m", "unlatch")):
    # A group of its own, so that a signal reaches what a terminal would reach and nothing else.
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output(process):
    """All that it says until it ends; one that does not end takes nobody's time afterwards."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def wait_for_steps(folder, count, process):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        if len(metrics.read(folder)) >= count:
            return
        time.sleep(0.05)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no {count} steps: {process.communicate()[0]}")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_interrupted_run_leaves_a_checkpoint_and_nobody_behind(unlatch, conf, tmp_path, processes):
    flags = [*CUT, "--method", "1f1b", *CONSTANT]
    process = start("train", conf, "--out", "run", "--processes", processes, "--epochs", 100_000, *flags)
    wait_for_steps(tmp_path / "run", 8, process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    text = output(process)
    assert process.returncode == 130, text
    assert "interrupted; continue with: unlatch train --resume run" in text
    assert "Traceback" not in text
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    assert not stop_file(tmp_path / "run").exists()
    fed = metrics.read(tmp_path / "run")[-1]["step"]
    epochs = -(-fed // 6) + 1
    result = unlatch("train", "--resume", "run", "--epochs", epochs, "--processes", 1)
    assert result.exit_code == 0, result.output
    unlatch("train", conf, "--out", "whole", "--epochs", epochs, *flags)
    one, other = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("run", "whole"))
    assert all(one[name].equal(other[name]) for name in other)


def interrupt_twice(folder):
    with stopping_on_signals(folder):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_file(folder).exists()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)


def test_first_signal_asks_second_interrupts(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt_twice(tmp_path)
    assert not stop_file(tmp_path).exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_torchrun_trains_the_same_weights(unlatch, conf, tmp_path):
    flags = [*CUT, "--method", "dtr", "--epochs", 2]
    unlatch("train", conf, "--out", "one", *flags)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "unlatch")
    process = start("train", conf, "--out", "two", *flags, launcher=launcher)
    text = output(process)
    assert process.returncode == 0, text
    assert text.count("writing to two") == 1
    one, other = (load_file(tmp_path / name / "last" / "model.safetensors") for name in ("one", "two"))
    assert all(one[name].equal(other[name]) for name in one)
