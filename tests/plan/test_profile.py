"""Measured costs are complete, plausible, and leave no trace."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import PlanError
from unlatch.nn import chain
from unlatch.plan import BlockCost, profile


def test_bytes_are_exact() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Flatten())
    costs = profile(chain(model), torch.randn(32, 8), repeats=1)
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    assert [cost.output_bytes for cost in costs] == [32 * 16 * 4, 32 * 16 * 4, 32 * 4 * 4, 32 * 4 * 4]
    assert [cost.weight_bytes for cost in costs] == [(8 * 16 + 16) * 4, 0, (16 * 4 + 4) * 4, 0]
    # The first layer keeps its input, the activation its output; the second layer keeps the same memory, counted once.
    assert [cost.kept_bytes for cost in costs] == [32 * 8 * 4, 32 * 16 * 4, 0, 0]


def test_first_block_needs_no_input_gradient() -> None:
    costs = profile(chain([nn.Linear(64, 64) for _ in range(3)]), torch.randn(64, 64), repeats=2)
    assert costs[0].input_grad == 0.0
    assert all(cost.input_grad > 0 for cost in costs[1:])
    assert all(cost.forward > 0 and cost.weight_grad >= 0 for cost in costs)
    assert costs[0].weight_grad > 0


def test_larger_blocks_cost_more() -> None:
    costs = profile(chain([nn.Linear(512, 512), nn.Linear(512, 8), nn.Linear(8, 8)]), torch.randn(128, 512), repeats=5)
    assert costs[0].forward > 3 * costs[2].forward
    assert costs[0].weight_grad > costs[2].weight_grad


def test_parameter_free_frozen_and_gradientless_blocks() -> None:
    frozen = nn.Linear(4, 4).requires_grad_(False)

    class Index(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    costs = profile(chain([frozen, nn.Tanh(), frozen, Index()]), torch.randn(6, 4), repeats=1)
    assert [cost.weight_grad for cost in costs] == [0.0] * 4
    assert costs[0].input_grad == 0.0
    assert costs[2].input_grad > 0
    assert costs[3] == BlockCost("3", costs[3].forward, 0.0, 0.0, 6 * 8, 0, 0)


def test_tokens_trees_and_in_place_blocks() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"h": x * 2, "mask": x > 0}

    class Unpair(nn.Module):
        def forward(self, x: dict[str, Tensor]) -> Tensor:
            return x["h"] * x["mask"]

    model = [nn.Embedding(7, 4), Pair(), Unpair(), nn.ReLU(inplace=True), nn.Linear(4, 7)]
    costs = profile(chain(model), torch.randint(0, 7, (3, 5)), repeats=1)
    assert costs[1].output_bytes == 3 * 5 * 4 * (4 + 1)


def test_loss_belongs_to_the_last_block() -> None:
    def slow_loss(y: Tensor) -> Tensor:
        time.sleep(0.02)
        return y.square().mean()

    blocks = chain([nn.Linear(4, 4), nn.Linear(4, 4)])
    costs = profile(blocks, torch.randn(3, 4), slow_loss, repeats=1)
    assert costs[1].forward > 0.02 > costs[0].forward


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    model[0].weight.grad = torch.ones(4, 4)
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.no_grad():
        profile(chain(model), x, repeats=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert model[3].weight.grad is None
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)
    assert x.grad is None


def test_evaluation_mode() -> None:
    modes: list[bool] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(self.training)
            return x * 1

        def __deepcopy__(self, memo: object) -> Spy:
            return Spy()

    profile(chain([Spy()]), torch.randn(2, 2), training=False, repeats=1)
    profile(chain([Spy()]), torch.randn(2, 2), repeats=1)
    assert modes == [False] * 3 + [True] * 3


def test_precision() -> None:
    dtypes: list[torch.dtype] = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dtypes.append(x.dtype)
            return x

        def __deepcopy__(self, memo: object) -> Spy:
            return Spy()

    profile(chain([nn.Linear(4, 4), Spy()]), torch.randn(2, 4), precision="bf16", repeats=1)
    assert set(dtypes) == {torch.bfloat16}


def test_failing_and_uncopyable_blocks() -> None:
    with pytest.raises(PlanError, match="block '1' fails on the sample"):
        profile(chain([nn.Linear(4, 4), nn.Linear(3, 4)]), torch.randn(2, 4))

    class Stubborn(nn.Module):
        def __deepcopy__(self, memo: object) -> Stubborn:
            raise TypeError("no copies of me")

    with pytest.raises(PlanError, match=r"cannot be copied.*no copies of me"):
        profile(chain([Stubborn()]), torch.randn(2, 4))


def test_shared_weights_stay_shared_in_the_copy() -> None:
    shared = nn.Linear(4, 4)
    seen: set[int] = set()

    class Spy(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            seen.add(id(self.layer.weight))
            return self.layer(x)

    profile(chain([Spy(shared), Spy(shared)]), torch.randn(2, 4), repeats=1)
    assert len(seen) == 1
    assert id(shared.weight) not in seen


def test_small_models_are_measured_quickly() -> None:
    start = time.perf_counter()
    profile(chain([nn.Linear(8, 8) for _ in range(10)]), torch.randn(4, 8))
    assert time.perf_counter() - start < 5.0
