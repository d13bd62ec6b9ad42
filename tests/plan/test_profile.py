"""Measured costs are complete, plausible, and leave no trace."""

from __future__ import annotations

import copy
import time
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from unlatch.errors import PlanError
from unlatch.nn import chain
from unlatch.plan import BlockCost, passes, profile
from unlatch.plan.passes import BlockTimes, ChainCopy, timed_pass, windows


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


class Hand:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    clock = Hand()
    monkeypatch.setattr(passes, "_now", clock)
    return clock


class Slow(nn.Module):
    """Takes a known time forward, and three times as long backward."""

    def __init__(self, seconds: float, hand: Hand) -> None:
        super().__init__()
        self.seconds = seconds
        self.hand = [hand]

    def __deepcopy__(self, memo: object) -> Slow:
        return Slow(self.seconds, self.hand[0])

    def forward(self, x: Tensor) -> Tensor:
        self.hand[0].now += self.seconds
        y = x * 2
        y.register_hook(self._backward)
        return y

    def _backward(self, grad: Tensor) -> None:
        self.hand[0].now += 3 * self.seconds


def test_every_block_is_charged_with_its_own_time(hand: Hand) -> None:
    first = nn.Linear(4, 4)
    costs = profile(chain([first, Slow(4.0, hand), Slow(1.0, hand), Slow(2.0, hand)]), torch.randn(3, 4), repeats=2)
    assert [cost.forward for cost in costs] == [0.0, 4.0, 1.0, 2.0]
    assert [cost.input_grad for cost in costs] == [0.0, 12.0, 3.0, 6.0]
    assert [cost.weight_grad for cost in costs] == [0.0] * 4


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


def test_loss_belongs_to_the_last_block(hand: Hand) -> None:
    def slow_loss(y: Tensor) -> Tensor:
        hand.now += 5.0
        return y.square().mean()

    blocks = chain([nn.Linear(4, 4), nn.Linear(4, 4)])
    costs = profile(blocks, torch.randn(3, 4), slow_loss, repeats=1)
    assert [cost.forward for cost in costs] == [0.0, 5.0]


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
    # Once to warm up, once to count bytes, once for each half of the backward.
    assert modes == [False] * 4 + [True] * 4


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


def test_shared_modules_stay_shared_in_the_copy() -> None:
    shared = nn.BatchNorm1d(4, affine=False)
    seen: set[int] = set()

    class Spy(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            seen.add(id(self.layer.running_mean))
            return self.layer(x)

    profile(chain([Spy(shared), Spy(shared)]), torch.randn(2, 4), repeats=1)
    assert len(seen) == 1
    assert id(shared.weight) not in seen


def test_small_models_are_measured_quickly() -> None:
    start = time.process_time()
    profile(chain([nn.Linear(8, 8) for _ in range(10)]), torch.randn(4, 8))
    assert time.process_time() - start < 5.0


class Journal(nn.Module):
    """Notes when its forward and its backward run."""

    lines: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.lines.append(f"F{self.name}")
        y = x * self.weight
        y.register_hook(lambda _: self.lines.append(f"B{self.name}"))
        return y


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(Journal, "lines", [])
    return Journal.lines


def test_a_window_goes_forward_through_all_its_blocks_before_the_first_backward(journal: list[str]) -> None:
    copied = ChainCopy(chain([Journal(name) for name in "abcd"]), torch.randn(2, 4))
    timed_pass(copied, [range(4)])
    assert " ".join(journal) == "Fa Fb Fc Fd Bd Bc Bb Ba"
    journal.clear()
    timed_pass(copied, [range(1), range(1, 4)])
    assert " ".join(journal) == "Fa Ba Fb Fc Fd Bd Bc Bb"
    journal.clear()
    # Nobody needs the gradient of the first block's input.
    timed_pass(copied, [range(4)], whole=False)
    assert " ".join(journal) == "Fa Fb Fc Fd Bd Bc Bb"


def test_profile_measures_in_the_order_of_training(journal: list[str]) -> None:
    profile(chain([Journal(name) for name in "abc"]), torch.randn(2, 4), repeats=2)
    warm, sizes = "Fa Ba Fb Bb Fc Bc", "Fa Fb Fc"
    repeat = "Fa Fb Fc Bc Bb Fa Fb Fc Bc Bb Ba"
    assert " ".join(journal) == " ".join([warm, sizes, repeat, repeat])


def test_graphs_kept_at_one_time_are_bounded(journal: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Each block keeps its input and hands on an output of 2 x 4 floats.
    monkeypatch.setattr(windows, "__defaults__", (2 * 2 * 32,))
    profile(chain([Journal(name) for name in "abcde"]), torch.randn(2, 4), repeats=1)
    whole = journal[-10:]
    assert " ".join(whole) == "Fa Fb Bb Ba Fc Fd Bd Bc Fe Be"


def test_windows_cover_all_blocks_and_respect_the_limit() -> None:
    sizes = [5, 1, 1, 1, 30, 2, 2, 9, 0, 0]
    for limit in range(0, 60):
        found = windows(sizes, limit)
        assert [position for part in found for position in part] == list(range(len(sizes)))
        assert all(len(part) == 1 or sum(sizes[position] for position in part) <= limit for part in found)
    assert windows(sizes, 51) == [range(0, 10)]
    assert windows(sizes, 10) == [range(0, 4), range(4, 5), range(5, 7), range(7, 10)]


def test_gradients_need_not_flow_from_block_to_block() -> None:
    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach()

    costs = profile(chain([nn.Linear(4, 4), Cut(), nn.Linear(4, 4)]), torch.randn(2, 4), repeats=1)
    assert costs[0].weight_grad > 0
    assert (costs[1].input_grad, costs[1].weight_grad) == (0.0, 0.0)
    assert costs[2].input_grad > 0


def test_best_and_mean_of_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, input gradient and whole backward are told apart, and centred as asked."""
    clock = iter([n * 0.5 for n in range(1000)])
    monkeypatch.setattr(passes, "_now", lambda: next(clock))
    blocks = chain([nn.Linear(4, 4), nn.Linear(4, 4)])
    assert timed_pass(ChainCopy(blocks, torch.randn(2, 4)), [range(2)]) == [BlockTimes(0.5, 0.5)] * 2
    halves = [[BlockTimes(2.0, 0.0), BlockTimes(4.0, 3.0)], [BlockTimes(3.0, 0.0), BlockTimes(4.0, 5.0)]]
    wholes = [[BlockTimes(1.0, 6.0), BlockTimes(4.0, 9.0)], [BlockTimes(6.0, 2.0), BlockTimes(8.0, 9.0)]]

    def measured(**options: Any) -> list[tuple[float, float, float]]:
        scripts = {True: iter([wholes[0], *wholes]), False: iter(halves)}
        monkeypatch.setitem(profile.__globals__, "timed_pass", lambda *_, whole=True: next(scripts[whole]))
        found = profile(blocks, torch.randn(2, 4), repeats=2, **options)
        return [(cost.forward, cost.input_grad, cost.weight_grad) for cost in found]

    assert measured() == [(1.0, 0.0, 2.0), (4.0, 3.0, 6.0)]
    assert measured(centre="mean") == [(3.0, 0.0, 4.0), (5.0, 4.0, 5.0)]


@pytest.mark.parametrize("centre", ["best", "mean"])
def test_noise_between_passes_is_no_cost_of_weights_that_are_not_trained(
    centre: Literal["best", "mean"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves and wholes are timed in different passes, so their difference is not exactly zero by itself."""
    times = {True: [BlockTimes(1.0, 6.0)] * 3, False: [BlockTimes(1.0, 2.0)] * 3}
    monkeypatch.setitem(profile.__globals__, "timed_pass", lambda *_, whole=True: times[whole])
    blocks = chain([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4).requires_grad_(False)])
    costs = profile(blocks, torch.randn(2, 4), repeats=2, centre=centre)
    same = {"best": 2.0, "mean": 4.0}[centre]
    assert [(cost.input_grad, cost.weight_grad) for cost in costs] == [(2.0, 4.0), (same, 0.0), (same, 0.0)]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1 repeat, got repeats=0"):
        profile(chain([nn.Linear(4, 4)]), torch.randn(2, 4), repeats=0)
    with pytest.raises(PlanError, match="one of best, mean, got 'median'"):
        profile(chain([nn.Linear(4, 4)]), torch.randn(2, 4), centre="median")  # type: ignore[arg-type]
