"""Train a small residual network on handwritten digits with DTRP, all stages in this process.

    python examples/quickstart.py

The inline executor gives the same weights, bit for bit, as one process per stage. Use it to try methods out.
"""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import unlatch


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    loader = unlatch.data.Loader(train, batch_size=64, shuffle=True)

    torch.manual_seed(0)
    model = unlatch.models.build("resnet8", in_channels=1)
    run = unlatch.parallelize(
        model,
        "dtrp",
        stages=2,
        loss_fn=cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        sample=loader.batch(0, 0),
    )
    print(run.plan)
    for epoch in unlatch.Trainer(run).fit(loader, epochs=3, eval_loader=unlatch.data.Loader(test)):
        print(f"epoch {epoch.epoch}: loss {epoch.loss:.3f}, test accuracy {epoch.evaluation['accuracy']:.3f}")
    for stage in run.statistics():
        print(f"stage {stage.stage}: {stage.staleness:.1f} updates stale, {stage.peak_bytes:,} bytes kept at most")

    trained = run.module()  # a plain nn.Module, usable without Unlatch
    print("parameters:", sum(p.numel() for p in trained.parameters()))


if __name__ == "__main__":
    main()
