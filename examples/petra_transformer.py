"""PETRA on a reversible transformer: stages keep no activations, they compute their inputs back from their outputs.

    python examples/petra_transformer.py

Shows what every stage keeps of the batches under way, as the library predicts it, beside a method that keeps inputs;
then trains. The first stage has an embedding, which cannot be inverted, so that it keeps inputs in either case.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.methods import get
from unlatch.plan.memory import stage_memory, stage_sizes

STAGES = 3


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return unlatch.models.build("rev-vit", image=8, patch=4, in_channels=1, depth=4, width=32, heads=2)


def kept(name: str) -> str:
    """Activations between forward and backward, of whole batches of 64, per stage."""
    method = get(name, microbatches=1)
    sizes = stage_sizes(model(), (64, 1, 8, 8), starts=[0, 2, 4])
    found = stage_memory(sizes, method.rules(), method.schedule(STAGES))
    return ", ".join(f"{stage.queue / 1e3:.0f}" for stage in found)


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    loader = unlatch.data.Loader(train, batch_size=64, shuffle=True)
    for name in ("dtr", "petra"):
        print(f"{name} keeps {kept(name)} kB of earlier batches")
    adam = partial(torch.optim.AdamW, lr=6e-3)
    where = {"stages": STAGES, "split": ["layers.1", "layers.3"]}
    run = unlatch.parallelize(model(), "petra", loss_fn=cross_entropy, optimizer=adam, **where)
    unlatch.Trainer(run).fit(loader, epochs=5)
    print(f"test accuracy {run.evaluate(unlatch.data.Loader(test))['accuracy']:.3f}")


if __name__ == "__main__":
    main()
