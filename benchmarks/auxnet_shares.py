"""What an AuxNet costs beside what it stands for, and the time of a step that follows from it: counted, not timed.

    python benchmarks/auxnet_shares.py

CIFAR ResNets with a stem of stride 2, FLOPs of one forward of one image; a backward counts as two forwards. A step of
auxnet takes as long as its slowest rank: forward and backward of its stage and of the AuxNet that predicts its input.
Messages, border losses and updates count nothing, so this is a bound from below.
"""

from __future__ import annotations

from typing import Any

import torch
from common import write
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unlatch.models import build
from unlatch.nn.auxiliary import capacity, coarse_parts, find_borders
from unlatch.nn.chain import chain, stage_starts

CUTS = {2: ["layer3.0"], 3: ["layer2.0", "layer3.0"]}
DEPTHS = (20, 32, 56)
IMAGE = (3, 32, 32)


def flops(net: nn.Module) -> int:
    """Of one forward of one image."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        net.eval()(torch.zeros(1, *IMAGE))
    return int(counter.get_total_flops())


def share(depth: int, stages: int) -> dict[str, Any]:
    """The AuxNets of one network and cut, and the slowest rank of a step against backpropagation."""
    net = build(f"resnet{depth}", stem_stride=2)
    blocks = chain(net)
    starts = stage_starts(blocks, CUTS[stages])
    borders = find_borders(blocks, starts, torch.zeros(2, *IMAGE))
    sizes = [capacity(coarse_parts(border, starts, 1, shared=False)[0], border) for border in borders]
    reached = [0, *(size.replaced_flops for size in sizes), flops(net)]
    predicted = [0, *(size.flops for size in sizes)]
    ranks = [end - begin + extra for begin, end, extra in zip(reached, reached[1:], predicted, strict=False)]
    return {
        "model": f"resnet{depth}",
        "split": CUTS[stages],
        "auxnets": [size.flop_ratio for size in sizes],
        "ranks": [rank / reached[-1] for rank in ranks],
        "step": max(ranks) / reached[-1],
    }


def main() -> None:
    rows = [share(depth, stages) for stages in CUTS for depth in DEPTHS]
    for row in rows:
        print(row)
    write("auxnet_shares", {"rows": rows})


if __name__ == "__main__":
    main()
