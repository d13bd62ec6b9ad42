"""Batch compensation measures a tick of DTR as it is: with gradients of inputs, and with all inputs that are kept."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn.functional import mse_loss

from small_nets import tanh_net, vectors
from unlatch.methods.compensation import choose_compensation
from unlatch.nn import chain

STAGES = 3


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, told):
        ctx.told = told
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ctx.told.append(ctx.needs_input_grad[0])
        return gradient if ctx.needs_input_grad[0] else None, gradient.sum(), None


class Watched(nn.Module):
    """Tells for every backward whether it had to hand a gradient down."""

    def __init__(self, told):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self._told = told

    def forward(self, x):
        return _Watched.apply(x, self.weight, self._told)

    def __deepcopy__(self, memo):
        return Watched(self._told)


def test_gradients_of_inputs_are_timed_at_all_stages_but_the_first():
    """They once were not: the slowest stage then seemed to be up to a third faster than it is."""
    told: list[list[bool]] = [[] for _ in range(STAGES)]
    stages = [chain(nn.Sequential(Watched(found))) for found in told]
    choose_compensation(stages, vectors(1)[0], mse_loss, candidates=(1,), repeats=2)
    assert told == [[False] * 2, [True] * 2, [True] * 2]


def measured_counts(cap):
    stages = [[block] for block in chain(tanh_net(STAGES))]
    chosen, why = choose_compensation(stages, vectors(1)[0], mse_loss, memory_cap=cap, repeats=1)
    counts = [int(count) for count in re.findall(r"(\d+): \d+/s", why)]
    assert chosen == 1 if not counts else chosen in counts
    return counts


def test_the_memory_of_2_k_inputs_per_stage_counts():
    """Stages keep 4 and 2 inputs, and the last one the batch that it works on; once each counted as one."""
    nbytes = vectors(1)[0][0].nbytes
    batch = (4 + 2 + 1) * nbytes
    assert measured_counts(batch - 1) == []
    assert measured_counts(2 * batch - 1) == [1]
    assert measured_counts(2 * batch) == [1, 2]
    assert measured_counts(8 * batch) == [1, 2, 4, 8]
