"""AugLocal: which blocks make a head, whose weights they have, and what training with them is."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from unlatch.errors import ConfigError
from unlatch.methods import AugLocal


def chain(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(layers - 1)]
    return nn.Sequential(*blocks, nn.Linear(5, 2)).double()


def begun(model: nn.Module, method: AugLocal, lr: float = 0.1) -> unlatch.Run:
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    return unlatch.parallelize(
        model,
        method,
        stages=3,
        split=["1", "3"],
        sample=(x, y),
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=lr),
    )


def heads(run: unlatch.Run) -> list[nn.Module]:
    return [run.stations[stage].trained()["head"].module for stage in (0, 1)]


def test_heads_are_later_blocks_and_get_shorter():
    run = begun(chain(), AugLocal(longest=3, shortest=1, microbatches=1))
    first, second = heads(run)
    # The last block changes the shape and is always there: 3 + 1 and 1 + 1 blocks.
    assert [len(first), len(second)] == [4, 2]
    assert all(isinstance(head[-1], nn.Linear) and head[-1].out_features == 2 for head in (first, second))


def test_heads_draw_weights_of_their_own_and_share_none():
    model = chain()
    run = begun(model, AugLocal(longest=2, microbatches=1))
    own = {id(p) for p in model.parameters()}
    for head in heads(run):
        assert not own & {id(p) for p in head.parameters()}
        assert not any(torch.equal(head[-1].weight, p) for p in model.parameters() if p.shape == head[-1].weight.shape)


def test_blocks_that_change_the_shape_are_always_taken():
    torch.manual_seed(0)
    sizes = [5, 5, 5, 7, 7, 7, 2]
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)]).double()
    run = begun(model, AugLocal(longest=1, microbatches=1))
    assert [(layer.in_features, layer.out_features) for layer in heads(run)[0]] == [(5, 5), (5, 7), (7, 2)]


def test_a_run_is_the_loop_written_by_hand():
    model, lr = chain(), 0.1
    run = begun(model, AugLocal(longest=2, microbatches=1), lr)
    stages = [copy.deepcopy(model[a:b]) for a, b in ((0, 1), (1, 3), (3, 6))]
    own_heads = [copy.deepcopy(head) for head in heads(run)]
    generator = torch.Generator().manual_seed(4)
    for _ in range(5):
        x = torch.randn(6, 5, dtype=torch.float64, generator=generator)
        y = torch.randn(6, 2, dtype=torch.float64, generator=generator)
        run.step(x, y)
        for k, stage in enumerate(stages):
            out = stage(x.detach())
            head = own_heads[k] if k < 2 else nn.Identity()
            params = [*stage.parameters(), *head.parameters()]
            grads = torch.autograd.grad(mse_loss(head(out), y), params)
            x = out
            with torch.no_grad():
                for p, g in zip(params, grads, strict=True):
                    p -= lr * g
    run.flush()
    for stage, (a, b) in zip(stages, ((0, 1), (1, 3), (3, 6)), strict=True):
        for mine, theirs in zip(stage.parameters(), model[a:b].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


class StandIn(nn.Module):
    """In the place of a module that is elsewhere: has what that one has."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["original"], name)

    def __deepcopy__(self, memo: object) -> nn.Module:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_making_heads_leaves_the_network_alone():
    """A head with a stand-in for the network's first layer drew new weights for that layer itself."""
    model = chain()
    model[4].append(StandIn(model[0][0]))
    before = copy.deepcopy(model.state_dict())
    begun(model, AugLocal(longest=5, microbatches=1))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="expected shortest <= longest, got 3 and 2"):
        AugLocal(longest=2, shortest=3)
    with pytest.raises(ConfigError, match='for a head of your own use "dgl"'):
        AugLocal(head=lambda border, output: nn.Linear(2, 2))
