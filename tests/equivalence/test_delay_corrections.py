"""asyncpp, xpipe, paci and cgad follow the recursion in float64, each with the one thing that it adds to pipedream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from recording import Optimizers, RecordingSGD, feed, stages_of
from recursions import begin, follow_recursion, torch_sgd
from small_nets import tanh_net, vectors
from unlatch.errors import ConfigError
from unlatch.methods import CGAD, PACI, AsyncPP, PipeDream, XPipe
from unlatch.reference import SGD

MOMENTUM = SGD(0.05, momentum=0.9, weight_decay=1e-2)


def train(method, stages, data, optimizer=None):
    run = begin(tanh_net(stages), method, torch_sgd(MOMENTUM) if optimizer is None else optimizer)
    feed(run, data)
    return run


def follows(method, stages, sgd=MOMENTUM, optimizer=None, batches=9, tolerance=1e-13, **options: Any):
    """Train, and compare with the recursion that the method's lateness and rules give."""
    model, data = tanh_net(stages), vectors(batches, size=12)
    return follow_recursion(model, method, data, sgd, optimizer=optimizer, tolerance=tolerance, **options)


def ended(method, optimizer=None, stages=3):
    model = train(method, stages, vectors(9, size=12), optimizer).module()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# --------------------------------------------------------------------- asyncpp


@dataclass(frozen=True)
class NAdam(SGD):
    """Adam with Nesterov momentum, written out; its state is (first moment, second moment, product of mu, count)."""

    betas: tuple[float, float] = (0.99, 0.999)
    decay: float = 4e-3

    def step(self, w: Any, v: Any, g: Any) -> Any:
        # Torch keeps the product in single precision, whatever the weights.
        m, n, product, t = v or (torch.zeros_like(w), torch.zeros_like(w), torch.tensor(1.0), 0)
        first, second = self.betas
        t += 1
        mu, following = (first * (1 - 0.5 * 0.96 ** (number * self.decay)) for number in (t, t + 1))
        product = product * mu
        m, n = first * m + (1 - first) * g, second * n + (1 - second) * g * g
        size = (n / (1 - second**t)).sqrt() + 1e-8
        part, ahead = float(product), float(product) * following
        step = (1 - mu) / (1 - part) * g / size + following / (1 - ahead) * m / size
        return w - self.lr * step, (m, n, product, t)


def raised(beta: float, delay: int) -> float:
    return 1 - (1 - beta) / (delay + 1)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_asyncpp_is_pipedream_with_nadam_whose_momentum_follows_the_delay(stages):
    optimizers = [NAdam(1e-2, betas=(raised(0.9, stages - 1 - k), 0.999)) for k in range(stages)]
    nadam = partial(torch.optim.NAdam, lr=1e-2, betas=(0.9, 0.999))
    run = follows(AsyncPP(microbatches=1), stages, optimizers, nadam, tolerance=1e-11)
    found = [stage.updater.optimizer.param_groups[0]["betas"][0] for stage in stages_of(run)]
    assert found == [raised(0.9, stages - 1 - k) for k in range(stages)]


def test_asyncpp_with_momentum_as_given():
    nadam = partial(torch.optim.NAdam, lr=1e-2, betas=(0.9, 0.999))
    follows(AsyncPP(microbatches=1, momentum="given"), 3, NAdam(1e-2, betas=(0.9, 0.999)), nadam, tolerance=1e-11)
    given, plain = (ended(method, nadam) for method in (AsyncPP(microbatches=1, momentum="given"), PipeDream(1)))
    assert torch.equal(given, plain)
    assert not torch.equal(ended(AsyncPP(microbatches=1), nadam), plain)


@pytest.mark.parametrize("parts", [1, 2])
def test_asyncpp_discounts_early_steps_by_the_delay(parts):
    method = AsyncPP(microbatches=parts, discount_updates=6, gamma=0.9)
    delays = [math.ceil(late) for late in method.staleness(4)]

    def scale(stage, update):
        return max(1, delays[stage]) ** -(1 - update / 6) if update < 6 else 1.0

    follows(method, 4, gamma=0.9, scale=scale)
    assert not torch.equal(ended(method, stages=4), ended(PipeDream(parts, gamma=0.9), stages=4))


# ----------------------------------------------------------------------- xpipe


@pytest.mark.parametrize("predict", ["linear", "difference", "geometric"])
@pytest.mark.parametrize(("stages", "parts", "accumulate"), [(1, 2, 1), (3, 1, 1), (3, 2, 1), (4, 3, 1), (3, 2, 2)])
def test_xpipe_predicts_once_per_mini_batch(stages, parts, accumulate, predict):
    method = XPipe(microbatches=parts, accumulate=accumulate, predict=predict)
    follows(method, stages, batches=9 * accumulate, predict=predict)


def test_xpipe_shares_what_pipedream_would_predict_anew():
    shared, anew = XPipe(microbatches=3), PipeDream(3, predict="linear")
    assert not torch.equal(ended(shared, stages=4), ended(anew, stages=4))
    # With one micro-batch per mini-batch there is nothing to share.
    assert torch.equal(ended(XPipe(microbatches=1)), ended(PipeDream(1, predict="linear")))
    run = train(shared, 4, vectors(30, size=12))
    found = run.statistics()
    assert [s.predicted_staleness for s in found] == [1.0, 1.0, 1.0, 0.0]
    assert [s.staleness for s in found] == [1.0, 1.0, 1.0, 0.0]


def test_xpipe_without_prediction_is_refused():
    with pytest.raises(ConfigError, match="without prediction this is pipedream"):
        XPipe(predict="none")


# ------------------------------------------------------------------------ paci


@pytest.mark.parametrize(("stages", "parts", "accumulate"), [(1, 1, 1), (2, 1, 1), (4, 1, 1), (4, 4, 1), (3, 2, 2)])
def test_paci_mixes_old_activations_with_the_newest_weights(stages, parts, accumulate):
    follows(PACI(microbatches=parts, accumulate=accumulate), stages, batches=9 * accumulate)


def test_paci_keeps_no_old_weights_and_is_not_pipedream():
    assert not torch.equal(ended(PACI(microbatches=1)), ended(PipeDream(1)))
    run = train(PACI(microbatches=1), 3, vectors(9, size=12))
    assert [stage.peak_versions for stage in stages_of(run)] == [0, 0, 0]
    assert PACI().rules().weight_copies(late=3) == 0


# ------------------------------------------------------------------------ cgad


def gate(method, stages, means):
    """The gate, written out: of (stage, gradients, age)."""
    late = method.staleness(stages)

    def collected(stage, gradients, age):
        if not late[stage]:
            return gradients
        flat = torch.cat([g.flatten() for g in gradients])
        mean = means.get(stage)
        weight = 1.0
        if age:
            cosine = 1.0 if mean is None else float(flat @ mean / (flat.norm() * mean.norm()))
            weight = math.exp(-method.alpha * age) * (1 + cosine) / 2
        means[stage] = flat if mean is None else method.memory * mean + (1 - method.memory) * flat
        return [weight * g for g in gradients]

    return collected


@pytest.mark.parametrize(("parts", "accumulate"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_cgad_weighs_each_gradient_by_cosine_and_age(stages, parts, accumulate):
    method = CGAD(microbatches=parts, accumulate=accumulate, alpha=0.3, memory=0.8, shrink=0.9)
    means: dict[int, Any] = {}
    follows(method, stages, batches=9 * accumulate, shrink=0.9, collected=gate(method, stages, means))
    assert sorted(means) == list(range(stages - 1))


def test_cgad_leaves_fresh_gradients_and_shortens_stale_ones():
    """With a learning rate of 0 gradients are backpropagation's but for their weight, which falls with the age."""
    found = {}
    for method in (CGAD(microbatches=1, alpha=0.5), PipeDream(1)):
        optimizers = Optimizers(RecordingSGD, lr=0.0)
        train(method, 3, vectors(1) * 8, optimizers)
        found[method.name] = [[torch.cat([g.flatten() for g in u]) for u in made.gradients] for made in optimizers.made]
    for k in range(3):
        ratios = [float(a.norm() / b.norm()) for a, b in zip(found["cgad"][k], found["pipedream"][k], strict=True)]
        # The same batch again and again agrees with all before: the cosine is 1.
        age = 2 - k
        expected = [math.exp(-0.5 * min(n, age)) for n in range(8)]
        assert ratios == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("options", [{"alpha": -0.1}, {"alpha": math.inf}, {"memory": 1.0}, {"memory": "much"}])
def test_cgad_refuses_bad_numbers(options):
    with pytest.raises(ConfigError, match=f"cgad: {next(iter(options))} must"):
        CGAD(**options)
