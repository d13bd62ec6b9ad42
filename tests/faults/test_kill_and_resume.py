"""Ranks that are killed again and again, at any moment, come back by themselves and end where they would have ended."""

from __future__ import annotations

import time

import pytest
import torch

import cycle_jobs
import unlatch

#: Together more than a hundred.
CYCLES = 15


def check(row, name, kills, seed, folder):
    line = row("F1", f"SIGKILL of a random rank at a random moment, {kills} times: {name}")
    expected = unlatch.launch(cycle_jobs.session, 2, args=(name, None, 0, seed))
    begin = time.monotonic()
    found = unlatch.launch(cycle_jobs.session, 2, args=(name, str(folder), kills, seed), max_restarts=kills)
    for undisturbed, restarted in zip(expected, found, strict=True):
        assert (restarted["start"], restarted["resumed"]) == (kills, True)
        for one, other in zip(undisturbed["weights"], restarted["weights"], strict=True):
            assert torch.equal(one, other)
    line.found(f"weights of the undisturbed run, bit for bit; {(time.monotonic() - begin) / kills:.1f} s a cycle")


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cycle_jobs.METHODS)
def test_a_hundred_cycles(row, name, tmp_path):
    check(row, name, CYCLES, 1, tmp_path / "checkpoints")


def test_some_cycles(row, tmp_path):
    check(row, "pipedream", 2, 2, tmp_path / "checkpoints")
