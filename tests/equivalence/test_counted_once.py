"""Batch norm counts each micro-batch once; dropout depends on (seed, stage, micro-batch) alone; under every method."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from rank_jobs import momentum_sgd
from recording import Optimizers, feed
from small_nets import CONV_SPLITS, conv_net, images, on_plain_nets, vectors
from unlatch.methods import Local, get
from unlatch.nn import replayable

METHODS = unlatch.methods.names()
# In the others stages see inputs, and samples, by ways of their own.
GLOBAL = [name for name in METHODS if not isinstance(get(name), Local)]


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_batch_norm_counts_each_micro_batch_once(name, microbatches):
    stages = min(microbatches, 4) if name == "pipedream-2bw" else 4
    model = conv_net()
    run = unlatch.parallelize(
        model,
        on_plain_nets(get(name, microbatches=microbatches), stages),
        stages=stages,
        loss_fn=cross_entropy,
        optimizer=momentum_sgd,
        split=CONV_SPLITS[stages],
        sample=images([12])[0],
    )
    held_out = images([6], seed=2)
    for number, (x, y) in enumerate(images([12] * 7)):
        run.step(x, y)
        if number % 3 == 0:
            run.evaluate(held_out)
    run.flush()
    run.evaluate(held_out)
    counts = {key: int(t) for key, t in model.state_dict().items() if key.endswith("num_batches_tracked")}
    assert set(counts.values()) == {7 * microbatches}
    assert len(counts) == 3


@pytest.mark.parametrize("name", GLOBAL)
def test_running_statistics_without_motion_are_those_of_plain_training(name):
    """With weights that stand still, any order of work must leave the same averages."""
    model, truth = conv_net(), conv_net()
    data = images([12] * 6)
    microbatches = 3
    run = unlatch.parallelize(
        model,
        on_plain_nets(get(name, microbatches=microbatches), 3),
        stages=3,
        loss_fn=cross_entropy,
        optimizer=Optimizers(torch.optim.SGD, lr=0.0),
        split=CONV_SPLITS[3],
        seed=9,
    )
    feed(run, data)
    stages = [truth[0:1], truth[1:3], truth[3:4]]
    micro = 0
    with torch.no_grad():
        for x, _ in data:
            for h in x.tensor_split(microbatches):
                for k, stage in enumerate(stages):
                    with replayable(9, k, micro):
                        h = stage(h)
                micro += 1
    for key, value in truth.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


class Mask(nn.Module):
    """Dropout that writes down its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(5, dtype=torch.float64))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        if self.training:
            self.seen.append(mask)
        return (x @ self.weight) * mask


def masks(name: str, seed: int, microbatches: int = 1) -> list[list[Tensor]]:
    model = nn.Sequential(Mask(), Mask(), Mask())
    run = unlatch.parallelize(
        model,
        on_plain_nets(get(name, microbatches=microbatches), 3),
        stages=3,
        loss_fn=mse_loss,
        optimizer=Optimizers(torch.optim.SGD, lr=0.1),
        split=["1", "2"],
        seed=seed,
    )
    torch.manual_seed(len(name))  # the state of torch's own generator must not matter
    data = vectors(6)
    for x, y in data:
        run.step(x, y)
        torch.rand(3)
        run.evaluate([(x, y)])
    run.flush()
    return [block.seen for block in model]


@pytest.mark.parametrize("name", GLOBAL)
def test_dropout_is_a_function_of_seed_stage_and_micro_batch(name):
    microbatches = 3
    recomputes = get(name).recomputes
    for k, seen in enumerate(masks(name, seed=11, microbatches=microbatches)):
        expected = []
        for micro in range(6 * microbatches):
            with replayable(11, k, micro):
                expected.append(nn.functional.dropout(torch.ones(2, 5, dtype=torch.float64), 0.5))
        passes = 2 if recomputes and k < 2 else 1
        assert len(seen) == passes * len(expected)
        for mask in expected:
            assert sum(torch.equal(mask, found) for found in seen) == passes


def test_masks_differ_between_seeds_stages_and_batches():
    one, other = masks("dtr", seed=11), masks("dtr", seed=12)
    assert not any(torch.equal(a, b) for a in one[2] for b in other[2])
    assert not torch.equal(one[0][0], one[1][0])
    assert not torch.equal(one[2][0], one[2][1])


def test_the_users_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    model = nn.Sequential(Mask(), Mask())
    run = unlatch.parallelize(
        model, "dtr", stages=2, loss_fn=mse_loss, optimizer=Optimizers(torch.optim.SGD, lr=0.1), split=["1"]
    )
    feed(run, vectors(4))
    assert torch.equal(torch.rand(4), expected)
