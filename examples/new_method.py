"""A new method in one file: a schedule, rules, a name.

    python examples/new_method.py

Links are slow: a message takes a tick and a half, so the delay grows by 3 per stage instead of 2. Inputs are kept, and
the step size halves from stage to stage. Forwards run at predicted weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.methods import Delayed, register
from unlatch.rules.activations import Input
from unlatch.rules.bundle import Rules
from unlatch.schedule import Schedule, check, rounds, streams, timetable


@register
@dataclass(frozen=True)
class Slow(Delayed):
    """DSP over slow links."""

    predict: str = "geometric"
    gamma: float = 0.5

    name = "slow"
    summary = "delay 3(K-k), inputs kept"

    def schedule(self, stages: int) -> Schedule:
        return rounds([3 * (stages - 1 - s) for s in range(stages)])

    def rules(self) -> Rules:
        return self._rules(Input())


def main() -> None:
    torch.set_num_threads(1)
    check(streams(Slow().schedule(3), [1] * 10), slots=2)  # complete, and free of deadlock with 2 messages per border
    print(timetable(Slow().schedule(2), 6, recompute=True))
    train, test = unlatch.data.load("digits")
    torch.manual_seed(0)
    run = unlatch.parallelize(
        unlatch.models.build("mlp", widths=(64, 128, 128, 10)),
        "slow",
        stages=3,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    )
    unlatch.Trainer(run).fit(unlatch.data.Loader(train, batch_size=64, shuffle=True), epochs=4)
    print(f"{run.method}: test accuracy {run.evaluate(unlatch.data.Loader(test))['accuracy']:.3f}")


if __name__ == "__main__":
    main()
