"""Accelerate around a run: its data loaders, printing, trackers; the forward, backward and update are the run's.

    pip install accelerate
    python examples/with_accelerate.py

`prepare` is given the loaders alone. The model and its optimizers are the run's: Accelerate would make copies of the
model work side by side, where a run cuts one model into stages.
"""

from __future__ import annotations

from functools import partial

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import unlatch


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train, test = unlatch.data.load("digits")
    loader, judge = accelerator.prepare(
        DataLoader(TensorDataset(train.x, train.y), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(test.x, test.y), batch_size=128),
    )
    with unlatch.parallelize(
        unlatch.models.build("mlp", widths=(64, 128, 128, 128, 10)),
        "pipedream",
        stages=2,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    ) as run:
        for epoch in range(3):
            for x, y in loader:
                result = run.step(x, y)
                accelerator.log({"train/loss": result.loss}, step=result.step)  # to the trackers of `log_with`
            accelerator.print(f"epoch {epoch}: loss {result.loss:.3f}")
        run.flush()
        accelerator.print(f"test accuracy {run.evaluate(judge)['accuracy']:.3f}")
        model = accelerator.unwrap_model(run.module())  # plain, with the newest weights: for accelerator.save_model
    accelerator.print(f"{sum(p.numel() for p in model.parameters())} parameters on {accelerator.device}")


if __name__ == "__main__":
    main()
