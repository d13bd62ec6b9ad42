"""Claim: on digits, with the defaults, every method reaches bp's test accuracy within 1.5 points (mean of 3 seeds) at
K=2, and fdg, dtr and dtrp at K=4.

    python benchmarks/accuracy_digits.py

ResNet-14 (8x8 maps, width 16), batch 64, 12 epochs, one-cycle, Nesterov; inline executor (the weights of a distributed
run are the same, bit for bit).
"""

from __future__ import annotations

from functools import partial

from accuracy_common import Study, print_table, train
from common import write

from unlatch.data import load
from unlatch.models import build

AT_TWO = (
    *("bp", "gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream", "pipedream-2bw"),
    *("ddg", "fr", "fdg", "adl", "dsp", "dtr", "dtrp"),
)
AT_FOUR = ("fdg", "dtr", "dtrp")
CUTS = {2: ["layer2.0"], 4: ["layer2.0", "layer2.1", "layer3.0"]}


def main() -> None:
    study, data = Study("accuracy_digits"), load("digits")
    net = partial(build, "resnet14", in_channels=1)
    for seed in range(3):
        for stages, methods in ((2, AT_TWO), (4, AT_FOUR)):
            for method in methods:
                settings = {"stages": stages, "split": CUTS[stages], "epochs": 12, "batch_size": 64, "lr": 0.1}
                study.run(
                    {"method": method, "stages": stages, "seed": seed},
                    partial(train, net, method, data, seed=seed, channels_last=False, **settings),
                )
    rows = study.summary(("method", "stages"), {"method": "bp"})
    print_table(rows)
    write("accuracy_digits", {"rows": rows, "command": "python benchmarks/accuracy_digits.py"})


if __name__ == "__main__":
    main()
