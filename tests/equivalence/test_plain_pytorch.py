"""What must equal plain PyTorch: one stage, any stage at learning rate zero, every gradient of synchronous methods."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from rank_jobs import falling_lr, momentum_sgd
from recording import Optimizers, RecordingSGD, feed
from small_nets import CONV_SPLITS, conv_net, images, on_plain_nets, vectors
from unlatch.methods import Local, get
from unlatch.nn import replayable

METHODS = unlatch.methods.names()
# In the others no gradient crosses a border, or it is scaled on purpose (cgad, which has a test of its own).
GLOBAL = [
    name for name in METHODS if not isinstance(get(name), Local) and get(name).rules().gradient.border_factor == 1.0
]
SYNCHRONOUS = ["bp", "gpipe", "1f1b", "zb-h1", "zb-h2"]
SEED = 3


def parts(method, data):
    """The micro-batches of a method, with the weight of each in its batch."""
    m = method.microbatches
    return [
        [(xi, yi, len(xi) / len(x)) for xi, yi in zip(x.tensor_split(m), y.tensor_split(m), strict=True)]
        for x, y in data
    ]


@pytest.mark.parametrize("name", METHODS)
def test_one_stage_is_a_hand_written_loop_bit_for_bit(name):
    data = images([12, 12, 12, 5, 1])
    model = conv_net()
    run = unlatch.parallelize(
        model,
        get(name, microbatches=1),
        stages=1,
        loss_fn=cross_entropy,
        optimizer=momentum_sgd,
        lr_scheduler=falling_lr,
        clip_grad_norm=0.5,
        seed=SEED,
    )
    losses = [r.loss for r in feed(run, data)]

    truth = conv_net()
    optimizer = momentum_sgd(list(truth.parameters()))
    schedule = falling_lr(optimizer)
    expected = []
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        with replayable(SEED, 0, number):
            loss = cross_entropy(truth(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        expected.append(loss.item())

    assert losses == expected
    for key, value in truth.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", GLOBAL)
def test_zero_learning_rate_gives_the_gradient_of_backpropagation_at_every_stage(name, stages):
    method = on_plain_nets(get(name, microbatches=stages if name == "pipedream-2bw" else 1), stages)
    data = [(x.double(), y) for x, y in images([12] * 7)]
    optimizers = Optimizers(RecordingSGD, lr=0.0)
    model = conv_net().double()
    run = unlatch.parallelize(
        model, method, stages=stages, loss_fn=cross_entropy, optimizer=optimizers, split=CONV_SPLITS[stages], seed=SEED
    )
    feed(run, data)

    truth = conv_net().double()
    starts = [0, *(int(name) for name in CONV_SPLITS[stages]), 4]
    modules = [truth[a:b] for a, b in pairwise(starts)]
    micro = 0
    for number, batch in enumerate(parts(method, data)):
        truth.zero_grad()
        for h, y, scale in batch:
            for k, module in enumerate(modules):
                with replayable(SEED, k, micro):
                    h = module(h)
            (cross_entropy(h, y) * scale).backward()
            micro += 1
        for k, module in enumerate(modules):
            assert len(optimizers[k].gradients) == len(data)
            for p, found in zip(module.parameters(), optimizers[k].gradients[number], strict=True):
                assert torch.equal(p.grad, found), (number, k)


class Fork(nn.Module):
    """One tensor in, two out; the second of them needs no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), x


class Twice(nn.Module):
    """Both tensors through the same weights, and a third output that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        a, b = pair
        return {"a": torch.sigmoid(self.shared(a)), "b": self.shared(torch.sin(self.shared(b))), "unused": a * 2}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, found: dict[str, Tensor]) -> Tensor:
        return found["a"] * self.scale + found["b"].cos()


def branched() -> nn.Sequential:
    """Tuple and dict activations, a weight used three times in one stage, and a linear layer shared by two blocks."""
    torch.manual_seed(0)
    again = nn.Linear(5, 5)
    return nn.Sequential(Fork(), Twice(), Join(), nn.Sequential(again, nn.Tanh()), nn.Sequential(again)).double()


BRANCHED_SPLITS = {1: [], 2: ["2"], 3: ["1", "2"], 4: ["1", "2", "3"]}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_synchronous_gradients_equal_backpropagation(name, stages, reduction):
    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return mse_loss(out, target, reduction=reduction)

    for microbatches, size in ((1, 6), (4, 8), (4, 11), (5, 3)):
        x, y = vectors(1, size=size)[0]
        optimizers = Optimizers(RecordingSGD, lr=0.0)
        run = unlatch.parallelize(
            branched(),
            get(name, microbatches=microbatches),
            stages=stages,
            loss_fn=loss_fn,
            optimizer=optimizers,
            split=BRANCHED_SPLITS[stages],
            loss_reduction=reduction,
        )
        result = run.step(x, y)

        truth = branched()
        loss = loss_fn(truth(x), y)
        loss.backward()
        assert result.loss == pytest.approx(loss.item(), rel=1e-12)
        found = [g for optimizer in optimizers.made for g in optimizer.gradients[0]]
        for p, g in zip(truth.parameters(), found, strict=True):
            assert (p.grad - g).abs().max() <= 1e-12, (microbatches, size)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
def test_split_backward_equals_the_fused_one(name):
    gradients = []
    for method in (name, "1f1b"):
        optimizers = Optimizers(RecordingSGD, lr=0.1)
        run = unlatch.parallelize(
            branched(),
            get(method, microbatches=4),
            stages=4,
            loss_fn=mse_loss,
            optimizer=optimizers,
            split=BRANCHED_SPLITS[4],
        )
        feed(run, vectors(3, size=11))
        gradients.append([g for optimizer in optimizers.made for update in optimizer.gradients for g in update])
    for split, fused in zip(*gradients, strict=True):
        torch.testing.assert_close(split, fused, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_accumulated_batches_are_averaged(name):
    data = vectors(2, size=6)
    optimizers = Optimizers(RecordingSGD, lr=0.1)
    run = unlatch.parallelize(
        branched(),
        get(name, microbatches=3, accumulate=2),
        stages=2,
        loss_fn=mse_loss,
        optimizer=optimizers,
        split=["2"],
    )
    feed(run, data)

    truth = branched()
    (sum(mse_loss(truth(x), y) for x, y in data) / 2).backward()
    found = [g for optimizer in optimizers.made for g in optimizer.gradients[0]]
    assert [len(optimizer.gradients) for optimizer in optimizers.made] == [1, 1]
    for p, g in zip(truth.parameters(), found, strict=True):
        assert (p.grad - g).abs().max() <= 1e-12
