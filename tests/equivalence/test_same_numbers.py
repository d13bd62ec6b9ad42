"""Methods that are several orders of one computation: studies run one of them and name the others after it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch

STEPS = 9


def weights(method: str, stages: int, microbatches: int, layers: int = 4) -> torch.Tensor:
    """After some updates of a network with batch norm, in single precision, as the studies have it."""
    torch.manual_seed(0)
    widths = [6, *[8] * layers]
    units = [nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(widths)]
    model = nn.Sequential(*units, nn.Linear(8, 3))
    with unlatch.parallelize(
        model,
        unlatch.methods.get(method, microbatches=microbatches),
        stages=stages,
        split=[str(index) for index in range(1, stages)],
        loss_fn=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    ) as run:
        for _ in range(STEPS):
            run.step(torch.randn(8, 6), torch.randint(3, (8,)))
        run.flush()
    return torch.cat([value.double().flatten() for value in model.state_dict().values()])


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("first", "others", "microbatches"),
    [
        ("pipedream", ["ddg", "asyncpp"], 1),
        ("pipedream", ["ddg", "asyncpp"], 4),
        ("fdg", ["adl"], 4),
        ("bp", ["gpipe", "1f1b", "zb-h1", "zb-h2"], 4),
    ],
)
def test_one_computation_in_several_orders(first, others, microbatches, stages):
    expected = weights(first, 1 if first == "bp" else stages, microbatches)
    for other in others:
        assert torch.equal(weights(other, stages, microbatches), expected), other


def test_what_is_told_apart_here_can_differ():
    assert not torch.equal(weights("pipedream", 2, 1), weights("pipedream", 2, 4))
    assert not torch.equal(weights("pipedream", 4, 1), weights("fdg", 4, 1))
