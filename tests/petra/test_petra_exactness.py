"""Where PETRA must equal backpropagation, plain SGD or DSP: frozen weights, one stage, the first group, a flush."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from recording import Optimizers, RecordingSGD, feed
from rev_nets import REVNET18, regression, rev_net, rev_run
from unlatch.methods import DSP, PETRA

PATTERNS = ["SH", "SRRRH", "SRDRH", REVNET18]


def plain_gradients(model: nn.Sequential, x: Tensor, y: Tensor) -> list[list[Tensor]]:
    """Per block, from one backward through the whole network."""
    model.zero_grad()
    mse_loss(model(x), y).backward()
    return [[p.grad.clone() for p in block.parameters() if p.grad is not None] for block in model]


def used_gradients(pattern: str, data: list[Any], *, lr: float, **options: Any) -> tuple[list[Any], list[Any]]:
    """What each stage's optimizer was given at each of its updates, and the initial network's own gradients."""
    model = rev_net(pattern)
    truth = [plain_gradients(copy.deepcopy(model), x, y) for x, y in data]
    optimizers = Optimizers(RecordingSGD, lr=lr)
    feed(rev_run(model, PETRA(microbatches=1, **options), optimizers), data)
    return [optimizers[j].gradients for j in range(len(pattern))], truth


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((s - t).detach().abs().max()) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_frozen_weights_give_exact_gradients(pattern: str) -> None:
    """O1: with learning rate zero every stage's gradient of every batch is backpropagation's."""
    used, truth = used_gradients(pattern, regression(2 * len(pattern) + 3), lr=0.0)
    for j, gradients in enumerate(used):
        assert len(gradients) == len(truth)
        for b, found in enumerate(gradients):
            assert distance(found, truth[b][j]) < 1e-15, (j, b)


@pytest.mark.parametrize("k", [1, 3])
def test_one_stage_is_plain_training(k: int) -> None:
    """O2: bit for bit, with accumulation as well."""
    model, data = rev_net("SRDRRH"), regression(12)
    plain = copy.deepcopy(model)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    optimizer = sgd(plain.parameters())
    for start in range(0, len(data), k):
        optimizer.zero_grad()
        for x, y in data[start : start + k]:
            mse_loss(plain(x), y).backward()
        for p in plain.parameters():
            assert p.grad is not None
            p.grad /= k
        optimizer.step()
    feed(rev_run(model, PETRA(microbatches=1, accumulate=k), sgd, []), data)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("lr", [0.01, 1.0])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_first_group_is_exact_and_the_second_is_not(pattern: str, k: int, lr: float) -> None:
    """O3: before any update nothing has moved, so the first update of every stage is the exact large-batch step."""
    used, truth = used_gradients(pattern, regression(2 * k), lr=lr, accumulate=k)
    later = 0.0
    for j, gradients in enumerate(used):
        means = [
            [sum(column) / k for column in zip(*(truth[b][j] for b in group), strict=True)] for group in _groups(k)
        ]
        assert distance(gradients[0], means[0]) < 1e-15
        later = max(later, distance(gradients[1], means[1]))
    assert later > 1e-4


def _groups(k: int) -> list[range]:
    return [range(k), range(k, 2 * k)]


def trained(model: nn.Sequential, method: Any, lr: float, steps: int = 25) -> list[Tensor]:
    model = copy.deepcopy(model)
    feed(rev_run(model, method, partial(torch.optim.SGD, lr=lr, momentum=0.9)), regression(steps))
    return [p.detach() for p in model.parameters()]


def test_without_reversible_stages_it_is_dsp() -> None:
    """O11, first half: bit for bit."""
    model = rev_net("SDDDH")
    one, other = trained(model, PETRA(microbatches=1), 0.05), trained(model, DSP(microbatches=1), 0.05)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_storing_all_inputs_is_dsp() -> None:
    model = rev_net("SRRDRH")
    dsp = trained(model, DSP(microbatches=1), 0.05)
    for method in (PETRA(microbatches=1, inputs="store"), PETRA(microbatches=1, store=(1, 2, 4))):
        assert all(torch.equal(a, b) for a, b in zip(trained(model, method, 0.05), dsp, strict=True))


def test_the_difference_to_dsp_vanishes_with_the_learning_rate() -> None:
    """O11, second half: it falls faster than the learning rate, since each step already has that as a factor."""
    model = rev_net(REVNET18)
    lateness = []
    for lr in (1e-2, 1e-3, 1e-4):
        lateness.append(distance(trained(model, PETRA(microbatches=1), lr), trained(model, DSP(microbatches=1), lr)))
    assert lateness[0] > 1e-7
    assert lateness[1] < lateness[0] / 15
    assert lateness[2] < lateness[1] / 50


@pytest.mark.parametrize("pattern", ["H", "SRRDRH"])
def test_a_group_of_equal_batches_gives_the_step_of_one(pattern: str) -> None:
    """O20: the mean is taken once; the first group of a pipeline is as good as a single stage."""
    x, y = regression(1)[0]
    model = rev_net("SRRDRH")
    starts = [] if pattern == "H" else None
    results = []
    for k in (1, 4):
        fresh = copy.deepcopy(model)
        feed(
            rev_run(fresh, PETRA(microbatches=1, accumulate=k), partial(torch.optim.SGD, lr=0.5), starts), [(x, y)] * k
        )
        results.append([p.detach() for p in fresh.parameters()])
    assert distance(*results) < 1e-15
    assert distance(results[0], [p.detach() for p in model.parameters()]) > 1e-3


@pytest.mark.parametrize("k", [1, 3])
def test_a_flush_after_every_group_is_accumulated_sgd(k: int) -> None:
    """O22: an empty pipeline has no delay."""
    model, data = rev_net(REVNET18), regression(6 * k)
    plain = copy.deepcopy(model)
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    run = rev_run(model, PETRA(microbatches=1, accumulate=k), sgd)
    optimizer = sgd(plain.parameters())
    for start in range(0, len(data), k):
        optimizer.zero_grad()
        for x, y in data[start : start + k]:
            run.step(x, y)
            (mse_loss(plain(x), y) / k).backward()
        run.flush()
        optimizer.step()
        assert distance([*model.parameters()], [*plain.parameters()]) < 1e-14


@pytest.mark.parametrize(("k", "lr"), [(1, 0.1), (4, 0.4)])
def test_it_learns_as_well_as_sgd_on_a_toy(k: int, lr: float) -> None:
    """O23: both reach a similar loss, far below the start."""
    data = [batch for epoch in range(25) for batch in regression(8)]
    found = {}
    for name, starts in (("sgd", []), ("petra", None)):
        method = PETRA(microbatches=1, accumulate=k)
        results = feed(rev_run("SRDRH", method, partial(torch.optim.SGD, lr=lr), starts), data)
        losses = [r.loss for r in results if r.loss is not None]
        found[name] = sum(losses[:8]) / 8, sum(losses[-8:]) / 8
    assert found["sgd"][1] < 0.4 * found["sgd"][0]
    assert found["petra"][1] < 1.05 * found["sgd"][1]
