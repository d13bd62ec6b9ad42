"""Claim: on CIFAR-10 (10,000 training images, ResNet-14 with stride-2 stem, 10 epochs of 100 updates), with the
defaults at K=4, fdg and dtrp come within 2.0 points of bp (mean of 3 seeds).

    python benchmarks/accuracy_cifar.py --data-dir DIR

One cycle to lr 0.1 with 20 % warm-up, Nesterov momentum 0.9, decay 5e-4 on weights, pad-4 crop and flip, fp32;
the last weights are tested on all 10,000 test images. Inline executor.
"""

from __future__ import annotations

import argparse
from functools import partial

from accuracy_common import Study, print_table, train
from common import write

from unlatch.data import load
from unlatch.models import build

METHODS = ("bp", "fdg", "dtrp")
CUT = ["layer2.0", "layer2.1", "layer3.0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    study, data = Study("accuracy_cifar"), load("cifar10", args.data_dir, train_size=10_000)
    net = partial(build, "resnet14", stem_stride=2)
    for seed in range(3):
        for method in METHODS:
            stages = 1 if method == "bp" else 4
            settings = {"epochs": 10, "batch_size": 100, "lr": 0.1}
            split = CUT if stages == 4 else "auto"
            study.run(
                {"method": method, "stages": stages, "seed": seed},
                partial(train, net, method, data, stages=stages, seed=seed, split=split, **settings),
            )
    rows = study.summary(("method", "stages"), {"method": "bp"})
    print_table(rows)
    write("accuracy_cifar", {"rows": rows, "command": "python benchmarks/accuracy_cifar.py --data-dir DIR"})


if __name__ == "__main__":
    main()
