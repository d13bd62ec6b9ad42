"""How DTR and DTRP scale with the learning rate and the number of modules: oracles 19, 20, 22 and 23."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from recording import Forwards, feed, stages_of
from recursions import begin
from rev_nets import regression
from small_nets import tanh_net, vectors
from unlatch.methods import DTR, DTRP, FDG, get
from unlatch.plan.layer_costs import LayerCost
from unlatch.schedule.simulation import simulate_schedule


def end_point(method, lr):
    model = tanh_net(3)
    feed(begin(model, method, partial(torch.optim.SGD, lr=lr)), vectors(40))
    return _flat(model)


def _flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", ["dtr", "dtrp"])
def test_oracle_19_the_distance_to_backpropagation_is_of_the_order_of_the_learning_rate(name):
    start = _flat(tanh_net(3))
    distances = []
    for lr in (1e-2, 1e-3, 1e-4):
        truth = end_point("bp", lr)
        found = end_point(get(name, microbatches=1), lr)
        distances.append(float((found - truth).norm() / (truth - start).norm()))
    assert 1e-5 < distances[-1] < distances[0] < 1e-2
    assert distances[0] / distances[1] == pytest.approx(10, rel=0.15)
    assert distances[1] / distances[2] == pytest.approx(10, rel=0.02)


def mean_gap(stages, predict):
    """Of the second forward to the first, at the stage where it is largest, in the smooth regime after the start."""
    gaps = []
    for seed in range(2):
        sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
        run = begin(tanh_net(stages, seed=seed), DTRP(microbatches=1, predict=predict), sgd)
        watched = [Forwards(stage.module) for stage in stages_of(run)[:-1]]
        feed(run, regression(40, width=5, seed=seed + 1))
        gaps.append(max(sum(forwards.lateness()[20:]) / 20 for forwards in watched))
    return sum(gaps) / len(gaps)


def test_oracle_20_prediction_narrows_the_gap_between_the_forwards_which_grows_with_the_modules():
    unpredicted, *predicted = (
        [mean_gap(stages, predict) for stages in (2, 3, 4)] for predict in ("none", "linear", "geometric")
    )
    for gaps in (unpredicted, *predicted):
        assert gaps == sorted(gaps)
    for gaps in predicted:
        assert all(gap < 0.6 * without for gap, without in zip(gaps, unpredicted, strict=True))


def test_oracle_22_memory_of_the_first_module():
    """It has a deep graph. DTR keeps one of them and 2(K-1) inputs, FDG 2(K-1) graphs."""
    depth, size, width = 30, 64, 5
    one = size * width * 8

    def kept(method, stages):
        torch.manual_seed(0)
        model = nn.Sequential(tanh_net(depth, width), *tanh_net(stages - 1, width))
        run = begin(model, method, partial(torch.optim.SGD, lr=0.05))
        feed(run, vectors(12, size=size, width=width))
        return run.statistics()[0].peak_bytes / one

    flat = [kept(DTR(microbatches=1), stages) for stages in (2, 3, 4, 5)]
    growing = [kept(FDG(microbatches=1), stages) for stages in (2, 3, 4, 5)]
    assert flat == [depth + 2 * (stages - 1) for stages in (2, 3, 4, 5)]
    graph = growing[0] / 2
    assert graph > depth
    assert growing == [2 * (stages - 1) * graph for stages in (2, 3, 4, 5)]
    assert flat[-1] / flat[0] < 1.25 < growing[-1] / growing[0]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_oracle_23_a_tick_is_a_third_longer_than_that_of_fdg_and_the_last_module_rests_in_a_quarter_of_it(stages):
    """A backward takes as long as two forwards, and all modules have the same work."""

    def run(method):
        layers = [LayerCost(str(stage), 1, 1, 1) for stage in range(stages)]
        return simulate_schedule(method.schedule(stages), method.workload(layers, range(stages)), batches=40)

    found, lighter = run(DTRP(microbatches=1)), run(FDG(microbatches=1))
    assert found.interval / lighter.interval == pytest.approx(4 / 3)
    shares = [busy / 40 / found.interval for busy in found.timeline.busy]
    assert shares == pytest.approx([1.0] * (stages - 1) + [3 / 4])
