"""The reference recursion itself: its special cases are plain stochastic gradient descent."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from unlatch.reference import SGD, recursion


@pytest.mark.parametrize("sgd", [SGD(0.1), SGD(0.05, 0.9, weight_decay=0.01), SGD(0.05, 0.9, nesterov=True)])
def test_without_delay_it_is_torch_sgd(sgd):
    torch.manual_seed(0)
    stages = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))).double()
    data = [(torch.randn(5, 3).double(), torch.randn(5, 2).double()) for _ in range(6)]
    path = recursion(list(copy.deepcopy(stages)), data, mse_loss, sgd, lambda k, i: i)
    optimizer = torch.optim.SGD(
        stages.parameters(), sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov, weight_decay=sgd.weight_decay
    )
    for x, y in data:
        optimizer.zero_grad()
        mse_loss(stages(x), y).backward()
        optimizer.step()
    for k, stage in enumerate(stages):
        for name, p in stage.named_parameters():
            torch.testing.assert_close(path.weights[k][-1][name], p.detach(), rtol=0, atol=1e-15)


def test_a_delay_changes_the_result():
    torch.manual_seed(0)
    stages = list(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double())
    data = [(torch.randn(5, 3).double(), torch.randn(5, 2).double()) for _ in range(6)]
    fresh = recursion(stages, data, mse_loss, SGD(0.1), lambda k, i: i)
    stale = recursion(stages, data, mse_loss, SGD(0.1), lambda k, i: max(0, i - 2) if k == 0 else i)
    assert not torch.equal(fresh.weights[0][-1]["weight"], stale.weights[0][-1]["weight"])
