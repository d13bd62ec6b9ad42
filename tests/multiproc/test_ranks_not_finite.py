"""Batches that are not finite, on several ranks: all go on as if they had never been fed, or all stop."""

from __future__ import annotations

import pytest
import torch

import guard_jobs
from unlatch.io.checkpoints import Checkpoints


@pytest.mark.parametrize(("kind", "accumulate"), [("loss", 1), ("gradient", 1), ("gradient", 2)])
def test_left_out_on_all_stages(ranks2, kind, accumulate):
    for wrong in ranks2.run(guard_jobs.wrong_ones, guard_jobs.SOME, kind, accumulate):
        assert wrong == []


def test_sessions_with_evaluations_and_checkpoints(ranks2, tmp_path):
    """A rank may be in the midst of something else when another one finds that all must go back."""
    for wrong in ranks2.run(guard_jobs.sessions_everywhere, ["bp", "pipedream", "dgl"], str(tmp_path)):
        assert wrong == []


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_stop_leaves_the_last_good_state(ranks2, tmp_path, kind):
    expected = ranks2.run(guard_jobs.gone_on, "pipedream", str(tmp_path / "good"))[0]
    below, above = ranks2.run(guard_jobs.stopped, "pipedream", kind, str(tmp_path / "bad"))
    latest = Checkpoints(tmp_path / "bad").latest()
    assert latest is not None
    assert int(latest.name.removeprefix("step-")) <= 9
    finder, other = (above, below) if kind == "loss" else (below, above)
    assert f"The last good state is saved in {latest}." in finder
    if kind == "loss":
        assert finder.startswith("NonFiniteLoss: the loss of batch 9 is nan (stage 2, after ")
        assert other.startswith("PeerLost: rank 1 (stages 1-2) stopped: the loss of batch 9 is nan")
    else:
        assert finder.startswith("NonFinite: the gradient of 0.0.weight is not finite in batch 9 (stage 0, after ")
        assert other.startswith("PeerLost: rank 0 (stage 0) stopped: the gradient of 0.0.weight is not finite")
    for found in ranks2.run(guard_jobs.gone_on, "pipedream", str(tmp_path / "bad")):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
