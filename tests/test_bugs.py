"""Bugs that were found, each with the test that found it made small."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from small_nets import tanh_net, vectors


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def test_pipedream_2bw_with_one_stage_trained_at_the_weights_before_the_last_update():
    losses = []
    for method in ("pipedream-2bw", "bp"):
        run = unlatch.parallelize(tanh_net(1), method, stages=1, loss_fn=mse_loss, optimizer=sgd)
        losses.append([run.step(x, y).loss for x, y in vectors(4)])
    assert losses[0] == losses[1]
