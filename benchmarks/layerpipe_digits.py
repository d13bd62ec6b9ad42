"""Claim: on digits, at 3 stages, layerpipe with stashed weights and with their moving average reaches bp's accuracy
within 1.5 points (mean of 3 seeds), with the defaults: Nesterov momentum, and the batch cut into micro-batches.

    python benchmarks/layerpipe_digits.py

ResNet-14 (8x8 maps, width 16), batch 64, 12 epochs, one-cycle. Mode `stages` has delay 2S (4, 2, 0 micro-batches); the
inline executor gives the weights of a distributed run, bit for bit. bp is also run on the same micro-batches, because
batch statistics over fewer samples change accuracy by themselves.
"""

from __future__ import annotations

from functools import partial

from accuracy_common import Study, print_table, train
from common import write

from unlatch.data import load
from unlatch.methods import BP, LayerPipe, Method
from unlatch.models import build

STAGES, CUT = 3, ["layer2.0", "layer3.0"]
METHODS: dict[str, Method] = {
    "bp": BP(),
    "bp, 4 parts": BP(microbatches=4),
    "layerpipe, stash": LayerPipe(mode="stages", weights="stash"),
    "layerpipe, average": LayerPipe(mode="stages", weights="average"),
    "layerpipe, latest": LayerPipe(mode="stages", weights="latest"),
}


def main() -> None:
    study, data = Study("layerpipe_digits"), load("digits")
    net = partial(build, "resnet14", in_channels=1)
    settings = {"stages": STAGES, "split": CUT, "epochs": 12, "batch_size": 64, "lr": 0.1, "channels_last": False}
    for seed in range(3):
        for name, method in METHODS.items():
            study.run({"method": name, "seed": seed}, partial(train, net, method, data, seed=seed, **settings))
    rows = study.summary(("method", "microbatches"), {"method": "bp"})
    print_table(rows)
    write("layerpipe_digits", {"rows": rows, "command": "python benchmarks/layerpipe_digits.py"})


if __name__ == "__main__":
    main()
