"""AuxNet: every stage trains at the same time on the same batch, each from an input that a small network predicts.

    python examples/auxnet.py

Shows accuracy, what the small network costs, and the ablation that matters: the shallow network of AuxNet and last
stage alone. What `auxnet` is better by is what the stage below contributes; digits are too easy to show it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.methods import AuxNet


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    loader = unlatch.data.Loader(train, batch_size=64, shuffle=True)
    for method in (AuxNet(), AuxNet(ablation="shallow")):
        torch.manual_seed(0)
        run = unlatch.parallelize(
            unlatch.models.build("resnet14", in_channels=1),
            method,
            stages=2,
            loss_fn=cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
            split=["layer3.0"],
            sample=loader.batch(0, 0),  # the AuxNets are made for its shapes
        )
        unlatch.Trainer(run).fit(loader, epochs=2)
        found = run.evaluate(unlatch.data.Loader(test))
        print(f"{method.call}: test accuracy {found['accuracy']:.3f}")
    print(run.notes[0])


if __name__ == "__main__":
    main()
