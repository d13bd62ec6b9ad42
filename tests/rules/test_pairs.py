"""Every pair of forward and backward weights follows its recursion in float64, or is refused by its name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import pytest

import unlatch
from recording import feed
from recursions import begin, follow_recursion, torch_sgd
from small_nets import tanh_net, vectors
from unlatch.errors import ConfigError
from unlatch.methods import Compose, Delayed
from unlatch.reference import SGD
from unlatch.rules.activations import Activation, Graph, Input
from unlatch.rules.bundle import Rules
from unlatch.rules.predict import predictor
from unlatch.rules.weights import (
    Average,
    BackwardWeights,
    Current,
    ForwardWeights,
    Lagging,
    Latest,
    Newest,
    Predicted,
    Stash,
)
from unlatch.schedule import Schedule, one_f_one_b_async, ticked

STAGES, PARTS, SGD_USED = 3, 3, SGD(0.05, momentum=0.9, weight_decay=1e-2)
KEPT = [Graph(), Input()]
FORWARD = [Newest(), Lagging(), Predicted(predictor("geometric")), Predicted(predictor("difference"))]
BACKWARD = [Current(), Stash(), Latest(), Average()]
REFUSED = {
    *(("predicted", "average", kept) for kept in ("graph", "input")),
    ("predicted", "current", "graph"),
    *(("lagging", "current", kept) for kept in ("graph", "input")),
}
PAIRS = [
    (kept, forward, backward)
    for kept, forward, backward in product(KEPT, FORWARD, BACKWARD)
    # A graph under torch's own check may not meet an update at all.
    if not (kept.keeps_graph and isinstance(backward, Current))
    and (forward.name, backward.name, kept.name) not in REFUSED
]


@dataclass(frozen=True)
class Pair(Delayed):
    """Any two rules on the order of 1F1B, or for forwards at the newest weights on a longer one."""

    kept: Activation = Graph()  # noqa: RUF009
    forward: ForwardWeights = Newest()  # noqa: RUF009
    backward: BackwardWeights = Stash()  # noqa: RUF009
    name = "pair"

    def schedule(self, stages: int) -> Schedule:
        return ticked(stages) if self.microbatches == 1 else one_f_one_b_async(stages)

    def rules(self) -> Rules:
        return self._rules(self.kept, self.backward, forward=self.forward)

    def lateness(self, stages: int) -> tuple[int, ...]:
        lags = isinstance(self.forward, Lagging)
        return (int(self.microbatches),) * stages if lags else super().lateness(stages)


@pytest.mark.parametrize(("kept", "forward", "backward"), PAIRS, ids=lambda rule: getattr(rule, "name", str(rule)))
def test_a_pair_follows_its_recursion(kept, forward, backward):
    for parts in (PARTS,) if isinstance(forward, Lagging) else (1, PARTS):
        method = Pair(microbatches=parts, kept=kept, forward=forward, backward=backward)
        lateness = method.lateness(STAGES)
        follow_recursion(
            tanh_net(STAGES),
            method,
            vectors(9, size=12),
            SGD_USED,
            version=lambda k, i: forward.version(max(0, i - lateness[k]) // parts, i // parts),  # noqa: B023
            delays=[math.ceil(late) for late in method.staleness(STAGES)],
            predict=forward.predictor.name if isinstance(forward, Predicted) else "none",
            tolerance=1e-13,
        )


def test_the_pairs_differ():
    """Otherwise the test above could not tell them apart."""
    ends = set()
    for kept, forward, backward in PAIRS:
        model = tanh_net(STAGES)
        parts = PARTS if isinstance(forward, Lagging) else 1
        method = Pair(microbatches=parts, kept=kept, forward=forward, backward=backward)
        feed(begin(model, method, torch_sgd(SGD(0.05, momentum=0.9))), vectors(9, size=12))
        ends.add(round(sum(float(p.detach().abs().sum()) for p in model.parameters()), 10))
    # Stashes agree with graphs and inputs; with inputs `latest` is `current`; one update back an average is exact.
    newest, lagging, predicted = 5, 3, 3
    assert len(ends) == newest + lagging + 2 * predicted


@pytest.mark.parametrize(("forward", "backward", "kept"), sorted(REFUSED))
def test_a_pair_that_cannot_be_is_refused_by_name(forward, backward, kept):
    rules = {rule.name: rule for rule in (*KEPT, *FORWARD, *BACKWARD)}
    with pytest.raises(ConfigError, match=f"{forward} forward weights do not go with backward weights '{backward}'"):
        Rules(rules[kept], rules[forward], rules[backward])


def test_methods_refuse_when_they_are_made():
    for weights, predict in (("average", "geometric"), ("current", "difference")):
        with pytest.raises(ConfigError, match=f"predicted forward weights do not go with backward weights '{weights}'"):
            Compose(order=ticked, weights=weights, predict=predict)
    with pytest.raises(ConfigError, match="do not go with backward weights 'average'"):
        unlatch.methods.LayerPipe(mode="stages", weights="average", predict="linear")
    with pytest.raises(ConfigError, match="weights must be one of current, stash, latest, average, got 'stsh'"):
        Compose(order=ticked, weights="stsh")
