"""A model of your own: say where it may be cut. Nothing is traced, subclassed or rewritten.

    python examples/own_model.py

`blocks()` lists modules whose composition is the model. Blocks hand on tensors, or nested tuples, lists and dicts of
them. So a skip connection across a cut travels in a tuple.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch


class Carry(nn.Linear):
    """Works on one tensor and carries a second one along; the first of its kind starts the pair."""

    def forward(self, state: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, skip = state if isinstance(state, tuple) else (state, state)
        return torch.relu(super().forward(h)), skip


class Head(nn.Linear):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward(pair[0] + pair[1])


class LongSkip(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
        self.body = nn.ModuleList(Carry(width, width) for _ in range(4))
        self.head = Head(width, 10)

    def blocks(self) -> list[nn.Module]:
        return [self.stem, *self.body, self.head]


def main() -> None:
    torch.set_num_threads(1)
    train, test = unlatch.data.load("digits")
    loader = unlatch.data.Loader(train, batch_size=64, shuffle=True)
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=2e-3)
    # Blocks have the names they have in the model. With a sample the chain is checked before training.
    where = {"stages": 3, "split": ["body.1", "body.3"], "sample": loader.batch(0, 0)}
    run = unlatch.parallelize(LongSkip(), "dtrp", loss_fn=cross_entropy, optimizer=adam, **where)
    print(run.plan)
    unlatch.Trainer(run).fit(loader, epochs=4)
    print(f"test accuracy {run.evaluate(unlatch.data.Loader(test))['accuracy']:.3f}")


if __name__ == "__main__":
    main()
