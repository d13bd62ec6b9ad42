"""Tied weights and skips on ranks: the weights of an inline run bit for bit, and checkpoints that have them once."""

from __future__ import annotations

import pytest
import torch

import tied_jobs
from unlatch.io import checkpoint


def assert_same(one: tied_jobs.Outcome, other: tied_jobs.Outcome) -> None:
    assert one[0][-len(other[0]) :] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, t in one[1].items():
        assert torch.equal(t, other[1][name]), name


@pytest.mark.parametrize("net", ["tied", "skips"])
def test_inline_and_ranks_agree_and_go_on_from_a_checkpoint(ranks2, tmp_path, net):
    first, second = ranks2.run(tied_jobs.trained_and_continued, net, str(tmp_path))
    for method in tied_jobs.METHODS:
        inline = tied_jobs.trained(method, net, distributed=False)
        for whole, rest in (first[method], second[method]):
            assert_same(inline, whole)
            assert_same(whole, rest)
        # What ranks saved goes on in one process.
        assert_same(inline, tied_jobs.continued(method, net, str(tmp_path), distributed=False))
        saved = checkpoint.read(tmp_path / f"{method}-{net}").model
        assert ("embed.weight" in saved) == (net == "tied")
        assert "head.linear.weight" not in saved
