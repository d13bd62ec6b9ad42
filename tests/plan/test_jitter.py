"""The jitter of repeated work is found, whatever the machine's speed does in the long run."""

from __future__ import annotations

import math
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn

from unlatch.errors import PlanError
from unlatch.nn import chain
from unlatch.plan import jitter
from unlatch.plan.jitter import relative_spread
from unlatch.plan.passes import BlockTimes
from unlatch.schedule.machine import Machine

BLOCKS = chain([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)])


@pytest.mark.parametrize("amount", [0.02, 0.1, 0.3])
def test_what_the_simulator_draws_is_found_again(amount: float) -> None:
    factors = Machine(jitter=amount).jitter_factors([20_000])
    assert factors is not None
    assert relative_spread(factors[0]) == pytest.approx(amount, rel=0.03)
    # A machine that becomes three times as slow meanwhile does not jitter more.
    drifting = np.array(factors[0]) * np.geomspace(1, 3, 20_000)
    assert relative_spread(drifting.tolist()) == pytest.approx(amount, rel=0.03)


def test_spread_by_hand() -> None:
    assert relative_spread([3.0] * 5) == 0.0
    # One step of factor e: half of its square is the variance of the logarithm.
    assert relative_spread([1.0, math.e]) == pytest.approx(math.sqrt(math.expm1(0.5)))


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 0.0], [1.0, math.inf], [1.0, math.nan]])
def test_spread_of_unusable_times(times: list[float]) -> None:
    with pytest.raises(PlanError, match="at least 2 of them, all positive and finite"):
        relative_spread(times)


def test_forwards_and_backwards_are_actions_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that vary against each other cancel out; forward and backward are weighted by their time."""
    passes = cycle([[BlockTimes(1.0, 4.0), BlockTimes(2.0, 5.0)], [BlockTimes(2.0, 6.0), BlockTimes(1.0, 6.0)]])
    monkeypatch.setitem(jitter.__globals__, "timed_pass", lambda *_: next(passes))
    found = jitter(BLOCKS, torch.randn(2, 4), repeats=4)
    backward = relative_spread([9.0, 12.0, 9.0, 12.0])
    assert found == pytest.approx(math.sqrt(42 / (12 + 42)) * backward)


def test_without_anything_to_train_only_forwards_count(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = cycle([[BlockTimes(1.0, 0.0)], [BlockTimes(2.0, 0.0)]])
    monkeypatch.setitem(jitter.__globals__, "timed_pass", lambda *_: next(passes))
    assert jitter(BLOCKS, torch.randn(2, 4), repeats=2) == pytest.approx(relative_spread([1.0, 2.0]))


def test_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    assert jitter(chain(model), x, lambda y: y.square().mean(), repeats=2) >= 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_errors_name_the_block_and_the_argument() -> None:
    with pytest.raises(PlanError, match="block '0' fails on the sample"):
        jitter(BLOCKS, torch.randn(2, 5))
    with pytest.raises(PlanError, match="expected at least 2, got repeats=1"):
        jitter(BLOCKS, torch.randn(2, 4), repeats=1)
