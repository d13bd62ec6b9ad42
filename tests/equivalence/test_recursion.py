"""Every delayed method follows the queue-free recursion, in float64."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recursions import follow_recursion
from small_nets import tanh_net, vectors
from unlatch.methods import get
from unlatch.reference import SGD

DELAYED = ["pipedream", "ddg", "fr", "fdg", "adl", "dsp", "dtr", "dtrp"]


def check(name, stages, sgd, steps=9, tolerance=0.0, **options):
    predict = options.get("predict", "geometric" if name == "dtrp" else "none")
    method = get(name, **{"microbatches": 1, **options})
    rules = {"predict": predict, "gamma": method.gamma, "shrink": method.shrink}
    data = vectors(steps * method.accumulate, size=12)
    follow_recursion(tanh_net(stages), method, data, sgd, tolerance=tolerance, **rules)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", DELAYED)
def test_exact_without_momentum(name, stages):
    check(name, stages, SGD(0.1), predict="none")


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", DELAYED)
def test_exact_with_momentum_and_decay(name, stages):
    check(name, stages, SGD(0.05, momentum=0.9, weight_decay=1e-2), predict="none")


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("predict", ["difference", "linear", "geometric", "constant-gradient"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["dtrp", "fdg", "pipedream"])
def test_predictors(name, stages, predict, nesterov):
    # Prediction sums the same terms in another order, hence rounding.
    check(name, stages, SGD(0.05, momentum=0.9, nesterov=nesterov, weight_decay=1e-2), predict=predict, tolerance=1e-13)


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches(name, microbatches):
    check(name, 3, SGD(0.05, momentum=0.9, nesterov=True), microbatches=microbatches, predict="none", tolerance=1e-15)


@pytest.mark.parametrize("name", DELAYED)
def test_accumulation(name):
    check(name, 3, SGD(0.05, momentum=0.9), accumulate=3, predict="none", tolerance=1e-15)


@pytest.mark.parametrize("name", ["fdg", "dtrp"])
def test_gamma_and_shrink(name):
    check(name, 4, SGD(0.05, momentum=0.9), gamma=0.5, predict="none", tolerance=1e-15)
    check(name, 4, SGD(0.05, momentum=0.9), shrink=0.5, predict="none", tolerance=1e-15)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipedream_2bw_is_one_update_behind_everywhere(stages):
    follow_recursion(
        tanh_net(stages),
        get("pipedream-2bw", microbatches=stages),
        vectors(7, size=12),
        SGD(0.05, momentum=0.9),
        version=lambda k, i: max(0, i // stages - 1),
        backward="forward",
        mixed=False,
        tolerance=1e-15,
    )


@settings(max_examples=30)
@given(
    name=st.sampled_from(DELAYED),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    steps=st.integers(1, 6),
    nesterov=st.booleans(),
    predict=st.sampled_from(["none", "difference", "geometric"]),
)
def test_any_combination(name, stages, microbatches, accumulate, steps, nesterov, predict):
    sgd = SGD(0.03, momentum=0.9, nesterov=nesterov, weight_decay=1e-3)
    options = {"microbatches": microbatches, "accumulate": accumulate, "predict": predict}
    check(name, stages, sgd, steps=steps, tolerance=1e-13, **options)
