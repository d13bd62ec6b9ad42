"""Blocks that remember and recall: which chains are refused, and what a wrapped block still is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import PlanError
from unlatch.nn import Add, Recall, Remember, StageChain, chain, state_names


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([linear(), Recall(Add(), "a")], "block '1' recalls 'a', which no block before it remembers"),
        ([Recall(Add(), "a"), Remember(linear(), "a")], "recalls 'a', which no block before it remembers"),
        ([Remember(linear(), "a"), linear()], "block '0' remembers 'a', which no later block recalls"),
        (
            [Remember(linear(), "a"), Remember(linear(), "a"), Recall(Add(), "a")],
            "'a' is remembered by blocks '0' and '1'",
        ),
    ],
)
def test_chains_that_are_refused(blocks: list[nn.Module], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        chain(blocks)


def test_a_block_that_recalls_cannot_be_called_by_itself() -> None:
    with pytest.raises(PlanError, match="only a chain of blocks carries"):
        Recall(Add(), "a")(torch.ones(1))


def test_a_name_may_be_recalled_twice_and_trees_be_remembered() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, 2 * x

    class Take(nn.Module):
        def forward(self, x: tuple[Tensor, Tensor] | Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] + pair[1] + (x if isinstance(x, Tensor) else x[0])

    blocks = chain([Remember(Pair(), "pair"), Recall(Take(), "pair"), nn.Identity(), Recall(Take(), "pair")])
    x = torch.ones(1)
    for cut in (1, 2, 3):
        middle = StageChain(blocks[:cut])(x)
        assert StageChain(blocks[cut:])(middle).item() == 7


def test_weights_keep_their_names_and_the_model_its_weights() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(linear(), nn.Tanh())
            self.last = nn.Sequential(nn.Sequential(linear(), nn.Tanh()), linear())
            self.last[0][0].weight = self.first[0].weight

        def blocks(self) -> list[nn.Module]:
            return [self.first, self.last]

    model = Deep()
    first, last = (StageChain([block], model) for block in chain(model))
    assert set(state_names(first, model).values()) == {"first.0.weight", "first.0.bias"}
    assert set(state_names(last, model).values()) == {"last.0.0.bias", "last.1.weight", "last.1.bias"}
    x = torch.randn(3, 2)
    out = last(first(x))
    assert torch.equal(out, model.last(model.first(x)))
    out.sum().backward()
    assert model.last[0][0].weight is model.first[0].weight
    assert all(p.grad is not None for p in model.parameters())
