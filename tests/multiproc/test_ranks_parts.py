"""A cut inside of a block on ranks: the weights of an inline run bit for bit, for every method."""

from __future__ import annotations

import torch

from part_jobs import SKIP, STREAM, trained, trained_each
from unlatch.methods import get, names


def test_every_method_cut_inside_of_a_block(ranks2):
    """Methods that learn from one tensor at a border are cut where one passes."""
    cases = [(name, STREAM if get(name).gradient == "local" else SKIP) for name in names()]
    inline = [trained(method, split, distributed=False) for method, split in cases]
    for outcomes in ranks2.run(trained_each, cases):
        for (method, _), (losses, state), (expected, weights) in zip(cases, outcomes, inline, strict=True):
            assert losses == expected, method
            for name, tensor in weights.items():
                assert torch.equal(tensor, state[name]), (method, name)
