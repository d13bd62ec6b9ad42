"""How far reconstructed inputs are from the true ones: exactly zero where theory says so, and as large as it says."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from petra_reference import petra_recursion
from recording import feed, listening
from rev_nets import REVNET18, regression, rev_net, rev_run
from unlatch.methods import PETRA
from unlatch.reference import SGD
from unlatch.runtime.reconstruction import NUMBERS, Reconstruction
from unlatch.transport.mail import BACKWARD, FORWARD


def measured(pattern: str, lr: float, batches: int = 40, **options: Any) -> dict[int, dict[int, float]]:
    """Per reversing stage, the error by micro-batch."""
    run = rev_run(pattern, PETRA(microbatches=1, **options), partial(torch.optim.SGD, lr=lr))
    feed(run, regression(batches))
    return {s.stage: dict(s.reconstruction) for s in run.statistics() if s.reconstruction_error is not None}


def late(found: dict[int, dict[int, float]]) -> float:
    """The sum of all errors after the pipeline has filled."""
    return sum(error for errors in found.values() for micro, error in errors.items() if micro >= 16)


def test_errors_are_those_of_the_recursion() -> None:
    model, data = rev_net("SRRDRRH"), regression(40)
    truth = petra_recursion(
        [nn.Sequential(block) for block in copy.deepcopy(model)],
        [letter == "R" for letter in "SRRDRRH"],
        data,
        mse_loss,
        SGD(0.05),
    )
    for stage, errors in measured("SRRDRRH", 0.05).items():
        assert sorted(errors) == [0, 1, 2, 4, 8, 16, 32]
        assert errors == pytest.approx({b: truth.errors[stage][b] for b in errors}, rel=1e-9, abs=1e-15)


def test_stored_inputs_stop_the_error() -> None:
    """O9: a stage that stores its input hands down the exact one, so only its neighbour's own step is approximate."""
    model, data = rev_net(REVNET18), regression(45)
    blocks = [nn.Sequential(block) for block in model]
    truth = petra_recursion(blocks, [letter == "R" for letter in REVNET18], data, mse_loss, SGD(0.05))
    for stage, letter in enumerate(REVNET18):
        steady = truth.errors[stage][30:]
        assert (max(steady) == 0.0) if letter != "R" else (min(steady) > 0.0)


def test_an_input_below_a_stored_one_is_reconstructed_from_the_true_output() -> None:
    """O9 at the executor: what a reversible stage below a stored one is given equals its own output, bit for bit."""
    run = rev_run("SRDH", PETRA(microbatches=1), partial(torch.optim.SGD, lr=0.1))
    with listening() as sent:
        feed(run, regression(15))
    outputs = {m.micro: m.payload[0] for m in sent if (m.kind, m.stage) == (FORWARD, 2)}
    given = {m.micro: m.payload[1] for m in sent if (m.kind, m.stage) == (BACKWARD, 1)}
    assert len(given) == 15
    for micro, handed_down in given.items():
        assert all(torch.equal(a, b) for a, b in zip(handed_down, outputs[micro], strict=True))


def test_the_error_falls_with_the_learning_rate_and_grows_towards_the_input() -> None:
    """O10, on a chain without resets."""
    pattern = "SRRRRRRRRH"
    by_rate = [measured(pattern, lr) for lr in (1e-3, 5e-4, 2.5e-4)]
    for larger, smaller in pairwise(by_rate):
        for stage in range(1, 9):
            assert 1.8 < larger[stage][32] / smaller[stage][32] < 2.2
    along = [by_rate[-1][stage][32] for stage in range(1, 9)]
    # One stream of the two is handed on as it is, with its error; it may be the worse one twice.
    assert all(above <= below for below, above in pairwise(along))
    assert along[-1] < 0.1 * along[0]
    assert max(measured(pattern, 0.0)[1].values()) < 1e-14


@pytest.mark.parametrize("lr", [0.05, 1.0])
def test_a_stash_makes_the_inverse_exact(lr: float) -> None:
    """O12: with the weights of the forward only rounding is left."""
    for errors in measured("SRRRRH", lr, weights="stash").values():
        assert max(errors.values()) < 1e-13
    assert max(measured("SRRRRH", lr)[1].values()) > 1e-2


def test_moving_average_weights_reconstruct_better_than_current_ones() -> None:
    current, average = (measured("SRRRRH", 0.01, weights=weights) for weights in ("current", "average"))
    assert 0 < late(average) < 0.5 * late(current)


def test_half_the_delay_has_a_smaller_error() -> None:
    ticked, alternating = (measured("SRRRRH", 0.01, order=order) for order in ("ticked", "1f1b"))
    assert 0 < late(alternating) < 0.7 * late(ticked)


def test_storing_one_stage_resets_the_error_there() -> None:
    plain, stored = measured("SRRRRH", 0.02), measured("SRRRRH", 0.02, store=(3,))
    assert set(plain) == {1, 2, 3, 4}
    assert set(stored) == {1, 2, 4}
    assert stored[2][32] < plain[2][32]


def test_few_numbers_of_large_inputs_are_kept() -> None:
    found = Reconstruction()
    x = torch.randn(8, 16, 32, 32).contiguous(memory_format=torch.channels_last)
    kept = found.sample(0, (x, x))
    assert NUMBERS // 2 < kept[0].numel() <= 2 * NUMBERS
    found.compare(0, kept, (x, 1.01 * x))
    assert found.worst == pytest.approx(0.01, rel=1e-4)
    assert found.sample(3, (x, x)) is None
    found.compare(3, None, (x, 2 * x))
    assert len(found.history) == 1


def test_nothing_is_measured_where_nothing_is_reconstructed() -> None:
    run = rev_run("SRH", "dsp", partial(torch.optim.SGD, lr=0.1))
    feed(run, regression(8))
    assert [(s.reconstruction_error, s.reconstruction) for s in run.statistics()] == [(None, ())] * 3
