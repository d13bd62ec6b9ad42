"""Inputs that are easily mistaken: memory that the caller uses again, and state that no gradient flows through."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from recording import feed
from rev_nets import branch, regression
from unlatch.methods import PETRA, get
from unlatch.nn import Coupling, Merge, Split, reversible

sgd = partial(torch.optim.SGD, lr=0.05)


def trained(model: nn.Sequential, data: list[Any], method: Any = "petra") -> tuple[list[Tensor], unlatch.Run]:
    model = copy.deepcopy(model)
    names = [str(i) for i in range(1, len(model))]
    run = unlatch.parallelize(
        model, get(method, microbatches=1), stages=len(model), loss_fn=mse_loss, optimizer=sgd, split=names
    )
    feed(run, data)
    return [p.detach() for p in model.parameters()], run


def test_a_network_that_is_reversible_from_its_first_block_keeps_no_input() -> None:
    model = nn.Sequential(Split(), Coupling(branch(2)), Coupling(branch(2)), nn.Sequential(Merge(), nn.Linear(4, 4)))
    _, run = trained(model.double(), regression(20))
    assert [s.stored_bytes for s in run.statistics()[:-1]] == [0, 0, 0]


def test_the_caller_may_refill_the_tensors_it_passed_to_a_reversible_first_stage() -> None:
    """A coupling hands on one of its inputs as it is: refilled memory came back down as the first stage's output."""
    model = nn.Sequential(Coupling(branch(4)), nn.Sequential(Merge(), nn.Linear(8, 4))).double()
    data = [((x, x.cos()), y) for x, y in regression(12)]
    fresh, _ = trained(model, data)
    buffers = torch.empty(6, 4, dtype=torch.float64), torch.empty(6, 4, dtype=torch.float64)

    def refilled() -> Any:
        for x, y in data:
            for buffer, t in zip(buffers, x, strict=True):
                buffer.copy_(t)
            yield buffers, y

    again, _ = trained(model, refilled())
    assert all(torch.equal(p, q) for p, q in zip(fresh, again, strict=True))


class Masked(nn.Module):
    """State with a mask and numbers that no gradient flows through, and an inverse of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((4,), 0.1))

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, number = state
        return torch.where(mask, x * self.log_scale.exp(), x), mask, number

    def inverse(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, number = state
        return torch.where(mask, x * (-self.log_scale).exp(), x), mask, number


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x > 0, torch.arange(len(x))


class Answer(nn.Module):
    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return state[0] + 0.01 * state[2][:, None]


def test_a_reversible_state_may_contain_masks_and_whole_numbers() -> None:
    """Torch forbids gradients of these; asking for them ended the first backward."""
    torch.manual_seed(0)
    model = nn.Sequential(Embed(), Masked(), Masked(), Answer()).double()
    stored, _ = trained(model, regression(10), PETRA(inputs="store", weights="stash"))
    inverted, run = trained(model, regression(10), PETRA(weights="stash"))
    assert [s.reconstruction_error is None for s in run.statistics()] == [True, False, False, True]
    for p, q in zip(stored, inverted, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-13)
    light, (x, y) = reversible(copy.deepcopy(model)), regression(1)[0]
    for module in (model, light):
        mse_loss(module(x), y).backward()
    for p, q in zip(model.parameters(), light.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-14)
