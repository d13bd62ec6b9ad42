"""Past weights from a moving average of updates: where it is exact, and where only the right beta makes it so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from unlatch.errors import CheckpointMismatch, ConfigError
from unlatch.rules.average import UpdateAverage


def run(
    average: UpdateAverage, updates: int, decrease: Callable[[int], Tensor]
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Apply scripted updates. **Returns:** the parameter and all its versions."""
    params = [nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))]
    versions = [params[0].detach().clone()]
    for t in range(updates):
        average.before_step(params)
        params[0].data.sub_(decrease(t))
        average.after_step(params)
        versions.append(params[0].detach().clone())
    return params, versions


U = torch.tensor([0.01, -0.02, 0.03], dtype=torch.float64)


def error(average: UpdateAverage, updates: int, decrease: Callable[[int], Tensor]) -> float:
    params, versions = run(average, updates, decrease)
    return float((average.past(params)[0] - versions[updates - average.delay]).abs().max())


@settings(max_examples=40)
@given(delay=st.integers(1, 14), beta=st.none() | st.floats(0.0, 0.99), extra=st.integers(0, 30))
def test_constant_updates_are_undone_exactly_with_any_beta(delay: int, beta: float | None, extra: int) -> None:
    assert error(UpdateAverage(delay, beta), delay + extra, lambda t: U) < 1e-12


@pytest.mark.parametrize("delay", [1, 2, 4, 6])
def test_evenly_growing_updates_are_undone_exactly_only_with_the_default_beta(delay: int) -> None:
    def ramp(t: int) -> Tensor:
        return U + 1e-3 * t * U

    assert error(UpdateAverage(delay), 300, ramp) < 1e-12
    for beta in (delay / (delay + 1), (delay - 1) / delay, 0.9):
        if beta != (delay - 1) / (delay + 1):
            assert error(UpdateAverage(delay, beta), 300, ramp) > 1e-6


def test_default_beta() -> None:
    assert [UpdateAverage(d).beta for d in (0, 1, 2, 3)] == [0.0, 0.0, pytest.approx(1 / 3), 0.5]


def test_no_delay_returns_the_parameters_themselves() -> None:
    average = UpdateAverage(0)
    params, _ = run(average, 3, lambda t: U)
    assert average.past(params)[0] is params[0]
    assert average.state_dict()["sum"] == []


def test_before_the_first_update_the_past_is_the_present() -> None:
    params = [nn.Parameter(torch.ones(2))]
    assert UpdateAverage(3).past(params)[0] is params[0]


def test_early_on_the_past_ends_at_the_first_weights() -> None:
    average = UpdateAverage(6)
    params, versions = run(average, 2, lambda t: U)
    assert (average.past(params)[0] - versions[0]).abs().max() < 1e-14


def test_shorter_delays_out_buffers_and_untouched_weights() -> None:
    average = UpdateAverage(4)
    params, versions = run(average, 9, lambda t: U)
    out = [torch.empty(3, dtype=torch.float64)]
    result = average.past(params, delay=2, out=out)
    assert result[0] is out[0]
    assert (result[0] - versions[7]).abs().max() < 1e-14
    assert torch.equal(params[0], versions[9])
    assert not average.past(params)[0].requires_grad


def test_random_updates_are_undone_better_than_not_at_all() -> None:
    generator = torch.Generator().manual_seed(3)
    average = UpdateAverage(6)
    params, versions = run(average, 60, lambda t: U + 0.2 * U * torch.randn(3, generator=generator, dtype=U.dtype))
    left = (average.past(params)[0] - versions[54]).norm()
    assert left < 0.25 * (versions[60] - versions[54]).norm()


def test_survives_a_checkpoint() -> None:
    average = UpdateAverage(3)
    params, _ = run(average, 5, lambda t: U * t)
    resumed = UpdateAverage(3)
    resumed.load_state_dict(average.state_dict())
    assert torch.equal(resumed.past(params)[0], average.past(params)[0])
    with pytest.raises(CheckpointMismatch, match="expected 'sum'"):
        resumed.load_state_dict({})


@pytest.mark.parametrize("bad", [{"delay": -1}, {"delay": 2, "beta": 1.0}, {"delay": 2, "beta": -0.1}])
def test_impossible_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected 0"):
        UpdateAverage(**bad)  # type: ignore[arg-type]
