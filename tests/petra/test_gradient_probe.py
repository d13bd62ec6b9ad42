"""The gradient probe: exact where a method is, as far off as it is elsewhere, and without effect on training."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

import unlatch
from petra_reference import petra_recursion
from recording import feed
from rev_nets import regression, rev_net, rev_run
from unlatch.errors import ConfigError
from unlatch.methods import FDG, PETRA, LayerPipe, PipeDream, get
from unlatch.reference import SGD
from unlatch.runtime.engine import Engine
from unlatch.train.probe import Comparison, GradientProbe, as_metrics
from unlatch.transport.mail import Mail

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
DELAYED = ["pipedream", "pipedream-2bw", "ddg", "fr", "fdg", "adl", "dsp", "dtr", "dtrp", "petra"]
LAYERPIPE = [LayerPipe(mode="stages", **more) for more in ({}, {"extra_delay": 1}, {"weights": "latest"})]
EXACT_AT_FORWARD = [
    PipeDream(microbatches=1),
    FDG(microbatches=2),
    FDG(microbatches=1, predict="geometric"),
    PipeDream(microbatches=3, accumulate=2, predict="linear"),
    get("pipedream-2bw", microbatches=6),
    PETRA(microbatches=2, weights="stash"),
    PETRA(microbatches=1, weights="stash", predict="geometric", order="1f1b"),
]


def probed(
    method: Any, optimizer: Any = sgd, pattern: str = "SRRDRH", batches: int = 24, **options: Any
) -> list[Comparison]:
    run = rev_run(pattern, method, optimizer)
    probe = run.probe_gradients(**(options or {"every": 1}))
    feed(run, regression(batches, size=12))
    return probe.found


def worst(found: list[Comparison], reference: str) -> float:
    return max(c.relative_error for c in found if c.reference == reference)


def test_backpropagation_is_exact() -> None:
    found = probed("bp")
    assert len(found) == 24 * 6 * 2
    assert max(worst(found, "forward"), worst(found, "current")) < 1e-14
    assert min(c.cosine for c in found) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("method", [*DELAYED, *LAYERPIPE], ids=str)
def test_frozen_weights_make_every_method_exact(method: Any) -> None:
    found = probed(get(method, microbatches=6), partial(torch.optim.SGD, lr=0.0), batches=12)
    assert max(worst(found, "forward"), worst(found, "current")) < 1e-13


@pytest.mark.parametrize("method", EXACT_AT_FORWARD, ids=lambda m: f"{m.name}-{m.predict}-{m.microbatches}")
def test_stashed_weights_give_the_gradient_at_the_weights_of_the_forward(method: Any) -> None:
    found = probed(method)
    assert worst(found, "forward") < 1e-11
    assert worst(found, "current") > 1e-3


@pytest.mark.parametrize("name", ["dsp", "dtr", "petra"])
def test_recomputation_gives_neither(name: str) -> None:
    found = probed(get(name, microbatches=1))
    assert min(worst(found, "forward"), worst(found, "current")) > 1e-3


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in weights.values()])


def test_the_numbers_are_those_of_the_recursion() -> None:
    """PETRA's gradients, and exact ones at the weights of both yardsticks, from the recursion's own records."""
    model, data, pattern, update = rev_net("SRRH"), regression(14, size=12), "SRRH", 9
    truth = petra_recursion(
        [nn.Sequential(block) for block in copy.deepcopy(model)],
        [letter == "R" for letter in pattern],
        data,
        mse_loss,
        SGD(0.05),
    )
    versions = {"forward": [max(0, update - 2 * (3 - j)) for j in range(4)], "current": [update] * 4}
    optimizer = partial(torch.optim.SGD, lr=0.05)
    found = {(c.reference, c.stage): c for c in probed(PETRA(microbatches=1), optimizer, "SRRH", 14, at=[update])}
    assert len(found) == 8
    x, y = data[update]
    for reference, chosen in versions.items():
        weights = [
            {n: w.clone().requires_grad_() for n, w in truth.weights[j][v].items()} for j, v in enumerate(chosen)
        ]
        h: Any = x
        for block, own in zip(model, weights, strict=True):
            h = functional_call(nn.Sequential(block), own, (h,))
        mse_loss(h, y).backward()
        for j in range(4):
            exact = flat({n: w.grad for n, w in weights[j].items() if w.grad is not None})
            used = flat(truth.gradients[j][update])
            c = found[reference, j]
            assert c.relative_error == pytest.approx(float((used - exact).norm() / exact.norm()), rel=1e-6)
            assert c.cosine == pytest.approx(float(used @ exact / used.norm() / exact.norm()), abs=1e-9)
            assert c.norm_ratio == pytest.approx(float(used.norm() / exact.norm()), rel=1e-9)


@pytest.mark.parametrize(
    "method",
    [PETRA(microbatches=2, accumulate=2), FDG(microbatches=2), PETRA(microbatches=1, weights="average")],
    ids=str,
)
def test_training_is_not_changed_by_looking(method: Any) -> None:
    models = [rev_net("SRRDRH", norm=True, dropout=0.2) for _ in range(2)]
    for model, looks in zip(models, (True, False), strict=True):
        run = rev_run(model, method, sgd)
        if looks:
            run.probe_gradients(every=2)
        feed(run, regression(16, size=12))
    for (name, a), (_, b) in zip(models[0].state_dict().items(), models[1].state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_tasks_that_are_placed_apart_are_refused_with_the_way_out() -> None:
    sample = (torch.randn(6, 4), torch.randn(6, 4))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    run = unlatch.parallelize(
        model, LayerPipe(microbatches=1), stages=2, loss_fn=mse_loss, optimizer=sgd, sample=sample
    )
    with pytest.raises(ConfigError, match="for layerpipe mode='stages'"):
        run.probe_gradients(every=1)


def test_an_incomplete_last_group_is_compared_as_it_is() -> None:
    found = probed(PETRA(microbatches=1, accumulate=4, weights="stash"), batches=10)
    assert {c.update for c in found} == {0, 1, 2}
    assert worst(found, "forward") < 1e-11


def test_a_probe_may_begin_while_the_pipeline_runs() -> None:
    run = rev_run("SRRH", PETRA(microbatches=1, accumulate=2, weights="stash"), sgd)
    data = regression(21)
    for x, y in data[:7]:
        run.step(x, y)
    probe = run.probe_gradients(every=1)
    feed(run, data[7:])
    assert {c.update for c in probe.found} == {4, 5, 6, 7, 8, 9, 10}
    assert worst(probe.found, "forward") < 1e-11


def test_results_are_told_as_they_come() -> None:
    told: list[list[Comparison]] = []
    run = rev_run("SRH", "petra", sgd)
    probe = run.probe_gradients(at=[2, 5], on_found=told.append)
    feed(run, regression(12))
    assert [sorted({c.update for c in part}) for part in told] == [[2], [5]]
    assert [*told[0], *told[1]] == probe.found
    names = as_metrics(told[0])
    assert len(names) == 1 + 3 * 2 * 3
    assert {"probe/stage0/forward/cosine", "probe/stage2/current/relative_error"} <= set(names)


def test_what_it_cannot_do() -> None:
    run = rev_run("SRH", "petra", sgd)
    for options in ({}, {"at": [1], "every": 2}, {"every": 0}):
        with pytest.raises(ConfigError, match="needs at="):
            run.probe_gradients(**options)
    dgl = unlatch.parallelize(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        "dgl",
        stages=2,
        loss_fn=mse_loss,
        optimizer=sgd,
        split=["1"],
        sample=(torch.randn(3, 4), torch.randn(3, 4)),
    )
    with pytest.raises(ConfigError, match="methods with local losses"):
        dgl.probe_gradients(every=1)
    engine = Engine({1: run.stations[1]}, run.method.schedule(3), Mail({1}), devices=(0, 1, 2))
    with pytest.raises(ConfigError, match=r"stages 1 to 1 of 3: run inline, .* distributed=False"):
        GradientProbe(engine, every=1)
