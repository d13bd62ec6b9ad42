"""What stages send each other and how often they work: activations only where they are needed, each branch twice."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from recording import feed, listening, stages_of
from rev_nets import regression, rev_net, rev_run
from unlatch.methods import PETRA
from unlatch.models import build
from unlatch.nn import Coupling, flatten
from unlatch.transport.mail import BACKWARD, FORWARD, Message

sgd = partial(torch.optim.SGD, lr=0.01)


def sent(run: unlatch.Run, batches: list[Any]) -> list[Message]:
    """All messages of a run, in the order of sending."""
    with listening() as found:
        feed(run, batches)
    return found


@pytest.mark.parametrize(
    ("method", "receivers"),
    [
        (PETRA(microbatches=1), {1, 2, 4}),
        (PETRA(microbatches=1, store=(2,)), {1, 4}),
        (PETRA(microbatches=1, weights="stash", order="1f1b"), {1, 2, 4}),
        (PETRA(microbatches=1, inputs="store"), set()),
    ],
    ids=["petra", "store", "stash", "inputs"],
)
def test_the_activation_goes_down_only_to_stages_that_invert(method: PETRA, receivers: set[int]) -> None:
    """A stage that is not reversible owns its exact input, so the message from above is the gradient alone."""
    messages = [m for m in sent(rev_run("SRRDRH", method, sgd), regression(15)) if m.kind == BACKWARD]
    assert Counter(m.stage for m in messages) == dict.fromkeys(range(5), 15)
    for message in messages:
        gradients, activation = message.payload
        assert len(gradients) == 2
        assert (activation is not None) == (message.stage in receivers)


def counted(model: nn.Module) -> Counter[str]:
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, Coupling):
            module.f.register_forward_hook(lambda *_, name=name: calls.update([name]))
    return calls


@pytest.mark.parametrize("inputs", ["reverse", "store"])
def test_each_branch_is_evaluated_twice_per_batch(inputs: Any) -> None:
    """O14 in a run: once forward, once for inverse and gradient together; storing the input saves nothing of that."""
    model = rev_net("SRRDRH")
    run = rev_run(model, PETRA(microbatches=1, inputs=inputs), sgd, [1, 3, 4, 5])
    feed(run, regression(1))  # the first batch is also used to check the inverses
    calls = counted(model)
    feed(run, regression(20))
    assert calls == {"1": 40, "2": 40, "4": 40}


def test_streams_stay_in_single_precision_under_autocast() -> None:
    """In a bfloat16 run all activations and gradients between stages are float32, and frozen weights invert well."""
    model = build("revnet8", width=4, in_channels=1)
    run = unlatch.parallelize(
        model,
        PETRA(microbatches=2),
        stages=5,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        precision="bf16",
        # Tried on a sample, the model computes in single precision.
        sample=(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))),
    )
    computed: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda module, args, out: computed.add(out.dtype))
    data = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))) for _ in range(6)]
    messages = sent(run, data)
    assert computed == {torch.bfloat16}
    streams = [t for m in messages if m.kind == FORWARD and m.payload for t in flatten(m.payload[0])[0]]
    gradients = [t for m in messages if m.kind == BACKWARD for t in flatten(m.payload)[0]]
    assert {t.dtype for t in (*streams, *gradients)} == {torch.float32}
    assert any(stage.reverses for stage in stages_of(run))
    # A stream in bfloat16 would be off by its rounding, 4e-3.
    assert max(s.reconstruction_error or 0.0 for s in run.statistics()) < 1e-5
