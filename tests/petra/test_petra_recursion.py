"""PETRA's trajectory is that of a recursion without queues, messages or clocks, in float64, bit for bit."""

from __future__ import annotations

import copy
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from petra_reference import Petra, petra_recursion
from recording import feed
from rev_nets import REVNET18, regression, rev_net, rev_run
from unlatch.methods import PETRA, get
from unlatch.reference import SGD


def parts(model: nn.Sequential, starts: list[int]) -> list[nn.Sequential]:
    bounds = [0, *starts, len(model)]
    return [nn.Sequential(*model[a:b]) for a, b in pairwise(bounds)]


def compare(
    pattern: str,
    method: PETRA,
    sgd: SGD,
    steps: int,
    starts: list[int] | None = None,
    atol: float = 0.0,
    *,
    norm: bool = False,
) -> Petra:
    """Train both ways; weights, running statistics and losses must agree."""
    model = rev_net(pattern, norm=norm)
    starts = list(range(1, len(pattern))) if starts is None else starts
    bounds = [0, *starts, len(pattern)]
    reversible = [set(pattern[a:b]) == {"R"} for a, b in pairwise(bounds)]
    data = regression(steps * method.accumulate, size=12)
    m, schedule = int(method.microbatches), method.schedule(len(reversible))
    written = parts(copy.deepcopy(model), starts)
    truth = petra_recursion(
        written,
        [is_rev and method.inputs == "reverse" and j not in method.store for j, is_rev in enumerate(reversible)],
        [part for x, y in data for part in zip(x.tensor_split(m), y.tensor_split(m), strict=True)],
        mse_loss,
        sgd,
        k=m * method.accumulate,
        delays=[schedule.delay(stage) for stage in range(schedule.stages)],
        backward=method.weights,
        predict=str(method.predict),
        counting=method.bn,
    )
    optimizer = partial(torch.optim.SGD, lr=sgd.lr, momentum=sgd.momentum, nesterov=sgd.nesterov)
    losses = [r.loss for r in feed(rev_run(model, method, optimizer, starts), data)]
    for j, part in enumerate(parts(model, starts)):
        for name, value in truth.weights[j][-1].items():
            torch.testing.assert_close(part.get_parameter(name), value, rtol=0, atol=atol)
        for name, value in written[j].named_buffers():
            torch.testing.assert_close(part.get_buffer(name), value, rtol=0, atol=atol)
    means = [sum(truth.losses[i : i + m]) / m for i in range(0, len(truth.losses), m)]
    assert losses == pytest.approx(means, rel=1e-12)
    return truth


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("pattern", ["SH", "SRH", "SRRH", "SRRRRH", "SDRH", "SRDRRH", REVNET18])
def test_one_block_per_stage(pattern: str, momentum: float) -> None:
    compare(pattern, PETRA(microbatches=1), SGD(0.05, momentum=momentum), steps=2 * len(pattern) + 5)


@pytest.mark.parametrize("starts", [[2], [1, 3], [1, 3, 4], [2, 5, 7]])
def test_several_blocks_per_stage(starts: list[int]) -> None:
    compare("SRRRDRRRH", PETRA(microbatches=1), SGD(0.05, momentum=0.9, nesterov=True), 20, starts)


@pytest.mark.parametrize(("microbatches", "accumulate"), [(2, 1), (3, 1), (1, 2), (1, 5), (2, 3)])
def test_groups_of_micro_batches(microbatches: int, accumulate: int) -> None:
    # 1/k is applied to the loss or to the sum of gradients: the same number, other rounding.
    method = PETRA(microbatches=microbatches, accumulate=accumulate)
    compare("SRDRH", method, SGD(0.05, momentum=0.9), 12, atol=1e-14)


@pytest.mark.parametrize(
    "method",
    [
        PETRA(microbatches=1, order="1f1b"),
        PETRA(microbatches=1, inputs="store"),
        PETRA(microbatches=1, weights="stash"),
        PETRA(microbatches=1, inputs="store", weights="stash"),
        PETRA(microbatches=1, store=(2,)),
        PETRA(microbatches=1, order="1f1b", weights="stash", store=(1, 2)),
    ],
    ids=str,
)
def test_options(method: PETRA) -> None:
    compare("SRRDRRH", method, SGD(0.05, momentum=0.9), 18)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("predict", ["difference", "linear", "geometric", "coasting", "constant-gradient"])
def test_forwards_at_predicted_weights(predict: str, nesterov: bool) -> None:
    sgd = SGD(0.05, momentum=0.9, nesterov=nesterov)
    compare("SRRDRH", PETRA(microbatches=1, predict=predict), sgd, 18, atol=1e-13)
    compare("SRRDRH", PETRA(microbatches=2, accumulate=2, predict=predict), sgd, 9, atol=1e-13)


@pytest.mark.parametrize(("microbatches", "accumulate"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("inputs", ["reverse", "store"])
def test_backwards_at_averaged_weights(inputs: Any, microbatches: int, accumulate: int) -> None:
    """Stage 0 of six is ten updates late, so that the average remembers."""
    method = PETRA(microbatches=microbatches, accumulate=accumulate, inputs=inputs, weights="average")
    compare("SRRDRH", method, SGD(0.05, momentum=0.9), 15, atol=1e-13)
    compare("SRRDRH", get(method, order="1f1b"), SGD(0.05, momentum=0.9), 15, atol=1e-13)


@pytest.mark.parametrize("bn", ["forward", "backward"])
@pytest.mark.parametrize(
    "options",
    [{}, {"microbatches": 3}, {"order": "1f1b", "weights": "stash"}, {"weights": "average"}, {"predict": "geometric"}],
    ids=str,
)
def test_with_batch_norm(options: dict[str, Any], bn: Any) -> None:
    """Batch statistics in every pass, running ones from that pass and at those weights which count."""
    method = PETRA(**{"microbatches": 1, "bn": bn, **options})
    compare("SRRDRRH", method, SGD(0.05, momentum=0.9), 14, atol=1e-12, norm=True)
    compare("SRRDRRH", method, SGD(0.05, momentum=0.9), 14, starts=[2, 4], atol=1e-12, norm=True)


def test_the_reference_can_disagree() -> None:
    truth = compare("SRRH", PETRA(microbatches=1), SGD(0.05), 12)
    other = compare("SRRH", PETRA(microbatches=1, inputs="store"), SGD(0.05), 12)
    assert not torch.equal(truth.weights[0][-1]["0.0.weight"], other.weights[0][-1]["0.0.weight"])


@settings(max_examples=25)
@given(
    pattern=st.lists(st.sampled_from("RRD"), min_size=0, max_size=5),
    microbatches=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    steps=st.integers(1, 6),
    order=st.sampled_from(["ticked", "1f1b"]),
    weights=st.sampled_from(["current", "stash"]),
    data=st.data(),
)
def test_any_combination(pattern, microbatches, accumulate, steps, order, weights, data) -> None:  # type: ignore[no-untyped-def]
    blocks = "S" + "".join(pattern) + "H"
    starts = sorted(data.draw(st.sets(st.integers(1, len(blocks) - 1))))
    method = PETRA(microbatches=microbatches, accumulate=accumulate, order=order, weights=weights)
    compare(blocks, method, SGD(0.03, momentum=0.9), steps, starts, atol=1e-13)
