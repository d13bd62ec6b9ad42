"""LayerPipe2 on the stage engine: delay 2S + extra_delay, weights stashed, latest or from a moving average."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from recording import Optimizers, RecordingSGD, Scripted, feed
from recursions import begin, behind, follow_recursion
from small_nets import tanh_net, vectors
from unlatch.errors import ConfigError, ScheduleError
from unlatch.methods import LayerPipe
from unlatch.reference import SGD
from unlatch.schedule import check, rounds, split_rounds, streams

PLAIN = SGD(0.1)


def check_recursion(method, stages, sgd=PLAIN, steps=14, tolerance=0.0):
    lateness = [2 * (stages - 1 - k) + method.extra_delay for k in range(stages)]
    return follow_recursion(
        tanh_net(stages),
        method,
        vectors(steps, size=12),
        sgd,
        version=behind(lateness, method.microbatches * method.accumulate),
        backward="forward",
        mixed=False,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("g", [0, 1, 3])
def test_stash_follows_the_recursion_exactly(stages, g):
    check_recursion(LayerPipe(mode="stages", extra_delay=g, microbatches=1), stages)


def test_a_backward_in_halves_changes_nothing():
    check_recursion(LayerPipe(mode="stages", split_backward=True, microbatches=1), 3, SGD(0.05, momentum=0.9))


@settings(max_examples=12)
@given(
    stages=st.integers(1, 4), g=st.integers(0, 3), m=st.integers(1, 3), accumulate=st.integers(1, 3), some=st.booleans()
)
def test_any_combination_follows_the_recursion(stages, g, m, accumulate, some):
    method = LayerPipe(mode="stages", extra_delay=g, microbatches=m, accumulate=accumulate)
    check_recursion(method, stages, SGD(0.05, momentum=0.9, nesterov=some), steps=3 * accumulate, tolerance=1e-14)


@pytest.mark.parametrize("g", [0, 2])
def test_measured_staleness_is_what_theory_gives(g):
    run = check_recursion(LayerPipe(mode="stages", extra_delay=g, microbatches=1), 3, steps=40)
    for stage in run.statistics():
        assert stage.staleness == stage.predicted_staleness == 2 * (2 - stage.stage) + g


# ------------------------------------------------------------------ weights


class Growing(Scripted):
    """Moves along a straight line with steps that grow evenly: W <- W + n u."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        params = self.param_groups[0]["params"]
        self.gradients.append([p.grad.clone() for p in params])
        torch._foreach_add_(params, self.u, alpha=self.count)


def gradients(weights, optimizers, g, steps):
    run = begin(tanh_net(3), LayerPipe(mode="stages", weights=weights, extra_delay=g, microbatches=1), optimizers)
    feed(run, vectors(steps))
    return [[torch.cat([t.flatten() for t in update]) for update in made.gradients] for made in optimizers.made]


@pytest.mark.parametrize("g", [0, 1])
def test_average_is_exact_for_constant_updates(g):
    stash = gradients("stash", Optimizers(Scripted), g, 12)
    average = gradients("average", Optimizers(Scripted), g, 12)
    latest = gradients("latest", Optimizers(Scripted), g, 12)
    for k in range(3):
        for one, other in zip(stash[k], average[k], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert (latest[0][-1] - stash[0][-1]).abs().max() > 1e-4


@pytest.mark.parametrize("g", [0, 1])
def test_average_is_exact_for_evenly_growing_updates_once_the_start_is_forgotten(g):
    script = {"scale": 1e-4}
    stash = gradients("stash", Optimizers(Growing, **script), g, 90)
    average = gradients("average", Optimizers(Growing, **script), g, 90)
    scale = max(float(stash[k][-1].abs().max()) for k in range(3))
    for k in range(3):
        torch.testing.assert_close(stash[k][-1], average[k][-1], rtol=0, atol=1e-9 * scale)


@pytest.mark.parametrize("sgd", [SGD(0.1), SGD(0.05, momentum=0.9, weight_decay=1e-2)], ids=["plain", "momentum"])
@pytest.mark.parametrize("weights", ["stash", "average", "latest"])
@pytest.mark.parametrize("stages", [4, 6])
def test_training_with_delays_of_six_and_ten_updates_follows_the_recursion(stages, weights, sgd):
    """At a delay of one update the average is the stash, so that only longer ones tell anything."""
    delays = [2 * (stages - 1 - k) for k in range(stages)]
    assert delays[0] in (6, 10)
    run = follow_recursion(
        tanh_net(stages),
        LayerPipe(mode="stages", weights=weights, microbatches=1),
        vectors(40, size=12),
        sgd,
        version=behind(delays),
        backward={"stash": "forward", "average": "average", "latest": "current"}[weights],
        mixed=weights != "stash",
        delays=delays,
        # The average sums up past updates, the reference whole weights.
        tolerance=1e-13 if weights == "average" else 0.0,
    )
    assert [stage.staleness for stage in run.statistics()] == delays


def test_the_three_kinds_of_weights_train_differently_at_such_delays():
    ends = []
    for weights in ("stash", "average", "latest"):
        model = tanh_net(4)
        method = LayerPipe(mode="stages", weights=weights, microbatches=1)
        feed(begin(model, method, partial(torch.optim.SGD, lr=0.1)), vectors(40, size=12))
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    stash, average, latest = ends
    assert 1e-6 < (average - stash).norm() < (latest - stash).norm()


class Scale(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight


def test_latest_mixes_old_activations_with_new_weights():
    optimizers = Optimizers(RecordingSGD, lr=0.01)
    model = nn.Sequential(nn.Sequential(Scale(0.7), Scale(1.3)), nn.Identity())
    run = begin(model, LayerPipe(mode="stages", weights="latest", microbatches=1), optimizers)
    feed(run, [(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))] * 9)
    seen = optimizers[0].weights
    for t, (first, second) in enumerate(optimizers[0].gradients):
        w, v = (x.item() for x in seen[max(0, t - 2)])  # of the forward, delay 2
        cotangent = 2 * v * w
        assert first.item() == pytest.approx(cotangent * seen[t][1].item(), rel=1e-14)
        assert second.item() == pytest.approx(cotangent * w, rel=1e-14)


# ---------------------------------------------------------------- stability

LIMITS = {0: 2.0, 1: 1.0, 2: 0.618, 3: 0.445, 4: 0.347, 5: 0.2846, 6: 0.2411, 7: 0.2091}


@pytest.mark.parametrize("delay", LIMITS)
def test_stability_limit_of_one_delayed_weight(delay):
    """w(t+1) = w(t) - a w(t-d), at 0.99 and 1.01 of the limit: delays from `g` on one stage, and from stages above."""
    limit = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert limit == pytest.approx(LIMITS[delay], abs=6e-4)
    curvature = torch.tensor([0.99, 1.01], dtype=torch.float64) * limit
    cases = [(LayerPipe(mode="stages", extra_delay=delay, microbatches=1), 1)]
    if delay % 2 == 0:
        cases.append((LayerPipe(mode="stages", microbatches=1), delay // 2 + 1))
    for method, stages in cases:
        model = nn.Sequential(Scale([1.0, 1.0]), *[nn.Identity() for _ in range(stages - 1)])
        run = begin(
            model,
            method,
            partial(torch.optim.SGD, lr=1.0),
            lambda out, target: 0.5 * (curvature * out.square()).sum(),
        )
        one = torch.ones(1, 2, dtype=torch.float64)
        path = []
        for _ in range(300):
            run.step(one, one)
            path.append(model[0].weight.detach().abs().clone())
        before, after = torch.stack(path[100:200]).amax(0), torch.stack(path[200:]).amax(0)
        assert after[0] < 0.95 * before[0], (delay, stages, "0.99 of the limit must converge")
        assert after[1] > 1.05 * before[1], (delay, stages, "1.01 of the limit must diverge")


# ----------------------------------------------------------------- schedule


@settings(max_examples=25)
@given(stages=st.integers(1, 5), g=st.integers(0, 4), groups=st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_split_rounds_are_valid_schedules(stages, g, groups):
    check(streams(split_rounds(stages, g), groups))


def test_split_rounds_refuse_what_they_cannot_do():
    with pytest.raises(ScheduleError, match="no earlier than the input gradient, got split=-1"):
        rounds((0,), split=-1)
    with pytest.raises(ScheduleError, match=r"needs its forward first .* backward_first=True"):
        rounds((2, 0), split=0, backward_first=True)
    with pytest.raises(ScheduleError, match="strictly falling"):
        rounds((0, 2), split=0)


@pytest.mark.parametrize(
    "options",
    [{"mode": "stage"}, {"weights": "old"}, {"extra_delay": -1}, {"extra_delay": 0.5}, {"shrink": 0.5}],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError, match=f"layerpipe: {next(iter(options))}"):
        LayerPipe(**options)
