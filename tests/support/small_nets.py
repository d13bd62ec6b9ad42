"""Networks and batches small enough to train in milliseconds, and rich enough to show what a runtime gets wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unlatch.methods import Method, get

Batch = tuple[Tensor, Tensor]

#: Blocks of `conv_net` that start the second and later stages, by number of stages.
CONV_SPLITS: dict[int, list[str]] = {1: [], 2: ["2"], 3: ["1", "3"], 4: ["1", "2", "3"]}


def conv_net(seed: int = 0) -> nn.Sequential:
    """Four blocks with batch norm, dropout in two stages, and channels_last weights."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.Sequential(nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(12, 5)),
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def on_plain_nets(method: str | Method, stages: int) -> Method:
    """The method, told to keep the inputs that it would compute back: these networks are not reversible."""
    chosen = get(method)
    return get(chosen, store=tuple(range(stages - 1))) if chosen.inverts else chosen


def images(sizes: list[int], seed: int = 1) -> list[Batch]:
    """Classification batches of these sizes, channels_last."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last),
            torch.randint(5, (n,), generator=generator),
        )
        for n in sizes
    ]


def tanh_net(blocks: int, width: int = 5, seed: int = 0) -> nn.Sequential:
    """A smooth network in float64, one linear layer per block."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(blocks)]).double()


def vectors(count: int, size: int = 6, width: int = 5, seed: int = 1) -> list[Batch]:
    """Regression batches in float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(size, width, generator=generator, dtype=torch.float64)

    return [(draw(), draw()) for _ in range(count)]
