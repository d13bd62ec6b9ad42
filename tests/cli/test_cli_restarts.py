"""Ranks that are lost come back by themselves, and the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from commands import Command, latest, same_weights
from scripts import TORCHRUN
from unlatch.io import metrics

SAVING = ["--save-every", "20 batches"]


def flags_of(method, cut):
    flags = ["--method", method, "--epochs", 40, "--set", "data.batch_size=64", *cut]
    settings = {"pipedream": "method.microbatches=1", "petra": "method.store=[0]"}
    return [*flags, "--set", settings[method]] if method in settings else flags


def assert_as_if_nothing_had_happened(unlatch, conf, *flags):
    result = unlatch("train", conf, *flags, "--out", "whole")
    assert result.exit_code == 0, result.output
    assert same_weights("run", "whole")
    lines = [[(row["step"], row["train/loss"]) for row in metrics.read(r) if "train/loss" in row] for r in RUNS]
    assert lines[0] == lines[1]
    ends = [[row["epoch/number"] for row in metrics.read(run) if "epoch/number" in row] for run in RUNS]
    assert ends[0] == ends[1] == list(range(1, 41))


RUNS = ("run", "whole")


@pytest.mark.parametrize(
    "method",
    ["pipedream", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("bp", "layerpipe", "petra"))],
)
def test_a_killed_rank(greenhouse, unlatch, conf, cut, method):
    flags = flags_of(method, cut)
    on_ranks = ("--out", "run", "--processes", 2, "--max-restarts", 3)
    with Command("train", conf, *flags, *SAVING, *on_ranks, greenhouse=greenhouse) as command:
        command.wait_until(lambda: latest("run") is not None, "no checkpoint")
        os.kill(command.ranks()[-1], signal.SIGKILL)
        code, said = command.ended()
    assert code == 0, said
    assert "restart 1 of 3" in said
    assert json.loads(Path("run/summary.json").read_text())["restarts"] == 1
    assert_as_if_nothing_had_happened(unlatch, conf, *flags)


def test_torchrun_continues_the_run_that_it_began(greenhouse, unlatch, conf, cut):
    """Without a name for the folder: processes that were started anew must find the one that they had."""
    flags = flags_of("dtrp", cut)
    launcher = (*TORCHRUN, "--max-restarts", "2", "-m", "unlatch")
    with Command("train", conf, *flags, *SAVING, launcher=launcher, greenhouse=greenhouse) as command:
        command.wait_until(lambda: latest("runs/dtrp-1") is not None, "no checkpoint")
        os.kill(command.ranks()[-1], signal.SIGKILL)
        code, said = command.ended()
    assert code == 0, said
    assert "continuing from runs/dtrp-1/checkpoints/step-" in said
    assert [path.name for path in Path("runs").iterdir()] == ["dtrp-1"]
    Path("runs/dtrp-1").rename("run")
    assert_as_if_nothing_had_happened(unlatch, conf, *flags)


def test_restarts_need_ranks_and_are_said_to_torchrun_itself(unlatch, conf, monkeypatch):
    result = unlatch("train", conf, "--max-restarts", 1)
    assert result.exit_code == 2
    assert "add --processes 2" in result.stderr
    assert not Path("runs").exists()
