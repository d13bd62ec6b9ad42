"""Small reversible networks in float64: one letter per block, so that a test shows the pattern it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from small_nets import on_plain_nets
from unlatch.nn import Coupling, Merge, Split, Streams

#: Stem, reversible and down-sampling blocks, head of RevNet-18 and RevNet-34.
REVNET18 = "SRRDRDRDRH"
REVNET34 = "SRRRDRRRDRRRRRDRRH"

Batch = tuple[Tensor, Tensor]


class Down(nn.Module):
    """Mixes both streams in a way that cannot be undone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, state: Streams) -> Streams:
        x, carried = state
        h = torch.tanh(self.main(x))
        return h + self.side(carried), h


def branch(width: int, *, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(width, width), nn.Tanh()]
    if norm:
        parts.insert(1, nn.BatchNorm1d(width))
    if dropout:
        parts.append(nn.Dropout(dropout))
    return nn.Sequential(*parts)


def rev_net(pattern: str, width: int = 4, seed: int = 0, **options: Any) -> nn.Sequential:
    """Blocks by letter: S stem, R coupling, D not reversible, H head. Inputs and outputs have `width` features."""
    torch.manual_seed(seed)
    make = {
        "S": lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), Split()),
        "R": lambda: Coupling(branch(width, **options)),
        "D": lambda: Down(width),
        "H": lambda: nn.Sequential(Merge(), nn.Linear(2 * width, width)),
    }
    return nn.Sequential(*[make[letter]() for letter in pattern]).double()


def regression(count: int, size: int = 6, width: int = 4, seed: int = 1) -> list[Batch]:
    """Batches of a task that can be learned: the target is a fixed smooth function of the input."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator, dtype=torch.float64)
    inputs = [torch.randn(size, width, generator=generator, dtype=torch.float64) for _ in range(count)]
    return [(x, torch.sin(x @ mix)) for x in inputs]


def rev_run(
    pattern: str | nn.Sequential, method: Any, optimizer: Any, starts: Sequence[int] | None = None, **options: Any
) -> unlatch.Run:
    """A run with one block per stage, or stages that start at these blocks; inputs are stored if none reverses."""
    model = rev_net(pattern) if isinstance(pattern, str) else pattern
    starts = range(1, len(model)) if starts is None else starts
    if starts and not any(isinstance(block, Coupling) for block in model[: starts[-1]]):
        method = on_plain_nets(method, len(starts) + 1)
    settings = {"loss_fn": mse_loss, "optimizer": optimizer, "split": [str(i) for i in starts], **options}
    return unlatch.parallelize(model, method, stages=len(starts) + 1, **settings)
