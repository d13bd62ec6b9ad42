"""Signals to the command line: whoever hears one and whenever, it ends in good order and says how to go on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from commands import CODES, Command, latest, same_weights
from unlatch.io import metrics
from unlatch.transport import signals

BOTH = [signal.SIGTERM, signal.SIGINT]
CONSTANT = ["--set", "lr.shape=constant", "--set", "optimizer.lr=0.05"]
ENDLESS = ["--out", "run", "--epochs", 1_000_000, "--method", "dtr", *CONSTANT]


def training(greenhouse, conf, *flags):
    command = Command("train", conf, *ENDLESS, *flags, greenhouse=greenhouse)
    try:
        command.wait_until(lambda: len(metrics.read("run")) >= 8, "it does not train")
    except BaseException:
        command.__exit__()
        raise
    return command


@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize("target", ["launcher", "rank", "group"])
def test_two_processes_save_and_say_how_to_go_on(greenhouse, conf, cut, target, number):
    with training(greenhouse, conf, *cut, "--processes", 2) as command:
        command.send(number, target)
        code, said = command.ended()
    assert code == CODES[number], said
    assert said.count("interrupted; continue with: unlatch train --resume run\n") == 1
    assert "Traceback" not in said
    assert latest("run") is not None
    assert not Path("run/stop").exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_what_was_stopped_goes_on_as_if_nothing_had_happened(greenhouse, unlatch, conf, cut, processes):
    with training(greenhouse, conf, *cut, "--processes", processes) as command:
        command.send(signal.SIGTERM, "group")
        code, said = command.ended()
    assert code == 143, said
    step = int(latest("run").name.removeprefix("step-"))
    epochs = step // 6 + 2
    result = unlatch("train", "--resume", "run", "--epochs", epochs, "--processes", 1)
    assert result.exit_code == 0, result.output
    assert f"continuing from run/checkpoints/step-{step:08d}: step {step}, 2 of them under way" in result.stdout
    assert "balance" in result.stdout
    unlatch("train", conf, "--out", "whole", "--epochs", epochs, "--method", "dtr", *CONSTANT, *cut)
    assert same_weights("run", "whole")
    losses = [[row["train/loss"] for row in metrics.read(run) if "train/loss" in row] for run in ("run", "whole")]
    assert losses[0] == losses[1]


def test_a_second_signal_ends_at_once(greenhouse, conf, cut):
    with training(greenhouse, conf, *cut, "--processes", 2) as command:
        # A rank that is stopped does not answer, so the first request is not met for a minute.
        os.kill(command.ranks()[-1], signal.SIGSTOP)
        command.send(signal.SIGTERM, "launcher")
        time.sleep(signals._SAME_REQUEST + 0.5)
        assert command.process.poll() is None, command.said()
        command.send(signal.SIGINT, "launcher")
        code, said = command.ended()
    assert code == 130
    assert "Traceback" not in said


@pytest.mark.parametrize("number", BOTH)
@pytest.mark.parametrize("library", ["libtorch", "sklearn"], ids=["importing", "preparing"])
def test_a_signal_before_anything_is_written(conf, number, library):
    with Command("train", conf, "--out", "run", "--method", "dtr", "--stages", 2, "--epochs", 100_000) as command:
        command.wait_until_it_imports(library)
        command.send(number, "group")
        code, said = command.ended()
    assert code == CODES[number], said
    assert_nothing_is_half_done(said)


@pytest.mark.parametrize(("target", "number"), [("launcher", signal.SIGINT), ("group", signal.SIGTERM)])
@pytest.mark.parametrize("moment", ["announced", "spawning"])
def test_a_signal_while_processes_start(conf, cut, target, number, moment):
    with Command("train", conf, *ENDLESS, *cut, "--processes", 2) as command:
        if moment == "announced":
            command.wait_until_it_says("writing to run")
        else:
            command.wait_until(lambda: len(command.ranks()) == 2, "no ranks")
        command.send(number, target)
        code, said = command.ended()
    assert code == CODES[number], said
    assert_nothing_is_half_done(said)


def assert_nothing_is_half_done(said):
    """It may have been quicker than the signal; then all is as for a run that was stopped in training."""
    assert "Traceback" not in said
    assert said.count("interrupted") == 1
    assert not Path("run").exists() or latest("run") is not None
    assert ("continue with" in said) == Path("run").exists()


def test_a_folder_that_was_there_before_stays(conf, cut):
    Path("run").mkdir()
    with Command("train", conf, *ENDLESS, *cut, "--processes", 2) as command:
        command.wait_until(lambda: len(command.ranks()) == 2, "no ranks")
        command.send(signal.SIGTERM, "launcher")
        code, said = command.ended()
    assert code == 143, said
    assert Path("run").is_dir()
    assert latest("run") is not None or not list(Path("run").iterdir())
