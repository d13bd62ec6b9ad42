"""A method of crossed parts: any schedule with any rules.

    python examples/compose.py

DTR keeps inputs and recomputes, on a ticked schedule with delay 2(K-k). Here its rules run on PipeDream's 1F1B order,
with half the delay; and PipeDream gets predicted forward weights.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.methods import DTR, Compose, Method, PipeDream
from unlatch.schedule import one_f_one_b_async

METHODS: dict[str, Method] = {
    "dtr": DTR(microbatches=4),
    "dtr on 1f1b": Compose(order=one_f_one_b_async, activations="input", weights="current", microbatches=4),
    "pipedream, predicted": PipeDream(predict="geometric", microbatches=4),
}


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    for name, method in METHODS.items():
        torch.manual_seed(0)
        run = unlatch.parallelize(
            unlatch.models.build("mlp", widths=(64, 128, 128, 10)),
            method,
            stages=3,
            loss_fn=cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        )
        unlatch.Trainer(run).fit(unlatch.data.Loader(train, batch_size=64, shuffle=True), epochs=3)
        accuracy = run.evaluate(unlatch.data.Loader(test))["accuracy"]
        stale = [f"{stage.staleness:.1f}" for stage in run.statistics()]
        print(f"{name}: lateness {method.lateness(3)}, staleness {' '.join(stale)}, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
