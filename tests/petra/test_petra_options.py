"""Options of PETRA compose: other orders, other backward weights, predicted forward weights, stored inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch
from recording import feed
from rev_nets import REVNET18, regression, rev_net, rev_run
from unlatch.errors import ConfigError
from unlatch.methods import DSP, PETRA, Compose, buffer_settings
from unlatch.models import build
from unlatch.models.gpt import next_token_loss
from unlatch.nn import chain
from unlatch.plan import make_plan
from unlatch.schedule import ticked

momentum = partial(torch.optim.SGD, lr=0.02, momentum=0.9)

ALL = [
    PETRA(order=order, weights=weights, predict=predict, inputs=inputs, microbatches=2)
    for order, weights, predict, inputs in product(
        ("ticked", "1f1b"), ("current", "stash", "average"), ("none", "geometric"), ("reverse", "store")
    )
    if (weights, predict) != ("average", "geometric")
]


@pytest.mark.parametrize("inputs", ["reverse", "store"])
def test_an_average_of_the_past_with_a_prediction_is_refused_by_name(inputs: Any) -> None:
    with pytest.raises(ConfigError, match="predicted forward weights do not go with backward weights 'average'"):
        PETRA(weights="average", predict="geometric", inputs=inputs)


@pytest.mark.parametrize("method", ALL, ids=lambda m: f"{m.order}-{m.weights}-{m.predict}-{m.inputs}")
def test_every_combination_trains(method: PETRA) -> None:
    model = rev_net("SRRDRH")
    run = rev_run(model, method, momentum)
    results = feed(run, regression(8, size=8) * 4)
    assert len(results) == 32
    found = run.statistics()
    late = 2 if method.order == "ticked" else 1
    # Two parts per update: in the mean half of the ticks are crossed.
    assert [s.staleness for s in found] == [late * (5 - j) / 2 for j in range(6)]
    assert [s.predicted_staleness for s in found] == [s.staleness for s in found]
    assert [s.reconstruction_error is not None for s in found] == [
        method.inputs == "reverse" and j in (1, 2, 4) for j in range(6)
    ]
    losses = [r.loss or 0.0 for r in results]
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])


def final(method: Any, pattern: str = "SRRDRH", optimizer: Any = momentum, steps: int = 20) -> list[Tensor]:
    model = rev_net(pattern)
    feed(rev_run(model, method, optimizer), regression(steps))
    return [p.detach() for p in model.parameters()]


def same(one: list[Tensor], other: list[Tensor], atol: float = 0.0) -> bool:
    return all(float((a - b).abs().max()) <= atol for a, b in zip(one, other, strict=True))


def test_inverse_with_stashed_weights_equals_stored_inputs_with_stashed_weights() -> None:
    """O12 in training: both are exact, so both trajectories are the same up to rounding."""
    one, other = (final(PETRA(microbatches=1, weights="stash", inputs=inputs)) for inputs in ("reverse", "store"))
    assert same(one, other, 1e-12)
    assert not same(one, final(PETRA(microbatches=1)), 1e-6)


def test_a_stash_gives_the_gradient_at_the_weights_of_the_forward() -> None:
    """Stashed weights and a kept graph are the same delayed gradient, so recomputing changes nothing."""
    graph = Compose(order=ticked, activations="graph", weights="stash", microbatches=1)
    assert same(final(PETRA(microbatches=1, weights="stash")), final(graph), 1e-12)


def test_average_weights_with_one_update_of_delay_and_constant_steps_are_exact() -> None:
    """An average over one update is that update, so two stages under 1F1B order train as with a stash."""
    average, stash = (
        final(PETRA(microbatches=1, weights=weights, order="1f1b"), "SH") for weights in ("average", "stash")
    )
    assert same(average, stash, 1e-12)


def test_prediction_changes_the_forward_only_once_there_is_delay() -> None:
    plain, predicted = (final(PETRA(microbatches=1, predict=predict), steps=1) for predict in ("none", "geometric"))
    assert same(plain, predicted)
    plain, predicted = (final(PETRA(microbatches=1, predict=predict)) for predict in ("none", "geometric"))
    assert not same(plain, predicted, 1e-6)


def test_prediction_brings_forward_and_backward_weights_together() -> None:
    """A forward at predicted weights is closer to the backward's, so the inverse is better."""

    def error(predict: str) -> float:
        optimizer = partial(torch.optim.SGD, lr=0.002, momentum=0.9)
        run = rev_run("SRRRRH", PETRA(microbatches=1, predict=predict), optimizer)
        feed(run, regression(70))
        return sum(e for s in run.statistics() for micro, e in s.reconstruction if micro >= 32)

    assert error("geometric") < 0.7 * error("none")


def test_the_four_buffer_settings() -> None:
    """The ablation of the paper is one loop; with frozen weights all four are the same."""
    still = partial(torch.optim.SGD, lr=0.0)
    for name, setting in buffer_settings().items():
        method = replace(setting, microbatches=1)
        run = rev_run("SRRDRH", method, momentum)
        feed(run, regression(24))
        found = run.statistics()
        stores_inputs, stores_weights = "inputs" in name, "weights" in name
        assert (found[1].stored_bytes > 0) == stores_inputs
        assert found[0].stored_bytes > 0
        assert (max(s.weight_copies for s in found) > 0) == stores_weights
        assert same(final(method, optimizer=still), final(DSP(microbatches=1), optimizer=still))


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_step_sizes_per_stage(gamma: float) -> None:
    """With lr so small that nothing moves to first order, the first update of stage j is scaled by gamma**(J-1-j)."""
    before, model = rev_net("SRRH"), rev_net("SRRH")
    run = rev_run(model, PETRA(microbatches=1, gamma=gamma), partial(torch.optim.SGD, lr=1e-3))
    feed(run, regression(1))
    reference = rev_net("SRRH")
    feed(rev_run(reference, PETRA(microbatches=1), partial(torch.optim.SGD, lr=1e-3)), regression(1))
    for j in range(4):
        for a, b, c in zip(*(m[j].parameters() for m in (model, before, reference)), strict=True):
            torch.testing.assert_close(a - b, gamma ** (3 - j) * (c - b), rtol=1e-9, atol=1e-15)


def test_deep_pipelines_of_the_papers_pattern() -> None:
    run = rev_run(REVNET18, PETRA(microbatches=1, accumulate=8), momentum)
    feed(run, regression(64))
    assert [s.staleness for s in run.statistics()] == [2 * (9 - j) / 8 for j in range(10)]


def images(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    return build(name, in_channels=1, width=8), torch.randn(8, 1, 8, 8), torch.randint(10, (8,)), cross_entropy


@pytest.mark.parametrize("name", ["revnet8", "revnet-fixed", "irevnet"])
def test_image_models(name: str) -> None:
    _learns(*images(name))


def test_transformers() -> None:
    vit = build("rev-vit", image=8, in_channels=1, depth=2, width=16, heads=2)
    _learns(vit, torch.randn(8, 1, 8, 8), torch.randint(10, (8,)), cross_entropy)
    gpt = build("rev-gpt", vocabulary=11, context=8, depth=2, width=16, heads=2, dropout=0.1)
    tokens = torch.randint(11, (8, 8))
    _learns(gpt, tokens, tokens, next_token_loss)


def _learns(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.05)
    # By number of parameters: a cut that is measured may be another one each time.
    plan = make_plan(chain(model), 4)
    run = unlatch.parallelize(
        model, PETRA(microbatches=2), stages=4, loss_fn=loss_fn, optimizer=optimizer, sample=(x, y), plan=plan
    )
    losses = [r.loss for r in feed(run, [(x, y)] * 12)]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < losses[0]
