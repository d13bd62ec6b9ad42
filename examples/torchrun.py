"""The same training under torchrun, one process per stage.

    torchrun --nproc-per-node 2 examples/torchrun.py
    python examples/torchrun.py                        # the same result inline

On two hosts, start it on each of them; 10.0.0.1 is the first, N is 0 there and 1 on the other:

    torchrun --nnodes 2 --node-rank N --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29500 examples/torchrun.py

torchrun sets RANK and WORLD_SIZE; `parallelize` joins the group (gloo). Give each process one thread, unless it has
more cores: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import os

import torch
from torch.nn.functional import cross_entropy

import unlatch


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    torch.manual_seed(0)
    model = unlatch.models.build("mlp", widths=(64, 128, 128, 128, 10))
    with unlatch.parallelize(
        model,
        "fdg",
        stages=2,
        loss_fn=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
        split=["layers.2"],
    ) as run:
        # Only the rank with stage 0 reads the loaders; the others may pass None.
        history = unlatch.Trainer(run).fit(unlatch.data.Loader(train, batch_size=64, shuffle=True), epochs=3)
        found = run.evaluate(unlatch.data.Loader(test))
    if os.environ.get("RANK", "0") == "0":
        print(f"last epoch: loss {history[-1].loss:.3f}; test accuracy {found['accuracy']:.3f}")


if __name__ == "__main__":
    main()
