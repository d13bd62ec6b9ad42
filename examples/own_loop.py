"""Your own loop: learning-rate schedule, clipping, checkpoints, and a run that continues with another cut and method.

    python examples/own_loop.py

`step` reports the batch that *finished*. While a pipeline fills, that is none: `result.loss` is then None.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import unlatch

EPOCHS = 3


def make_run(method: str, stages: int, split: list[str], updates: int) -> unlatch.Run:
    return unlatch.parallelize(
        unlatch.models.build("mlp", widths=(64, 128, 128, 128, 10)),
        method,
        stages=stages,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        lr_scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=updates),  # one step per update
        clip_grad_norm=1.0,  # of each stage by itself
        split=split,
    )


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    loader = unlatch.data.Loader(train, batch_size=64, shuffle=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, updates = Path(folder) / "last", EPOCHS * len(loader)
        torch.manual_seed(0)
        run = make_run("pipedream", 2, ["layers.2"], updates)
        for x, y in loader:
            result = run.step(x, y)
            if result.loss is not None and result.batch % 10 == 0:
                print(f"batch {result.batch}: loss {result.loss:.3f}, staleness {result.staleness}")
        run.save(checkpoint)  # empties the pipeline first
        other = make_run("dtrp", 3, ["layers.1", "layers.2"], updates)
        other.load(checkpoint)  # weights, optimizer, learning rate, counters
        for _ in range(1, EPOCHS):
            for x, y in loader:
                other.step(x, y)
        other.flush()  # finish the batches under way before looking at the weights
        print(f"test accuracy {other.evaluate(unlatch.data.Loader(test))['accuracy']:.3f}")
        print(*load_file(checkpoint / "model.safetensors"))  # the original names; plain PyTorch reads this file


if __name__ == "__main__":
    main()
