"""Claim (DTR, Figure 7: memory of ResNet-56 over the number of modules): from K = 2 to 8 the fullest stage of `fdg`
grows, since it keeps 2(K-k) graphs, while that of `dtr` and `dtrp`, which keep inputs, never takes more than that of
backpropagation in one process; and what the planner predicts is within 10 % of what is measured. Reached: the last two;
`fdg` takes twice as much at 8 as at 2, but does not grow at every step.

    python benchmarks/resnet56_memory.py [--stages 2 3 4 5 6 7 8] [--methods fdg dtr]

Batches of 16 images of 32x32, uncut, inline, SGD with momentum; the published cuts at K = 2 to 4, then cuts into stages
of the same multiply-accumulates. Bytes are those of live tensors at the worst moment, as in `memory_depth.py`: weights
and their versions, gradients, optimizer, what is kept of batches under way, and the graph at work. Nothing is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write
from decoupled_speed import CUTS, even_cut, network
from memory_depth import BATCH, train

from unlatch.methods import get

NETWORK, DEPTH = "ResNet-56", 56
STAGES = range(2, 9)
METHODS = ("bp", "ddg", "fr", "fdg", "dtr", "dtrp")


def row(name: str, stages: int) -> dict[str, Any]:
    split = (CUTS.get((NETWORK, stages)) or even_cut(network(NETWORK), stages)) if stages > 1 else []
    predicted, measured = train(get(name, microbatches=1), DEPTH, stages, split)
    return {
        "split": split,
        "method": name,
        "stages": stages,
        "predicted": predicted,
        "measured": measured,
        "ratio": max(predicted) / max(measured),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="*", default=list(STAGES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Backpropagation takes the same memory however many stages it has in one process, summed over them.
    rows = [row("bp", 1)]
    for name in args.methods:
        rows += [row(name, stages) for stages in args.stages if name != "bp"]
        for one in rows:
            if one["method"] == name:
                told = f"{max(one['measured']) / 1e6:7.1f} MB, predicted / measured {one['ratio']:.3f}"
                print(f"{name:6} K={one['stages']}: {told}", flush=True)
    result = {"rows": rows, "batch": BATCH, "depth": DEPTH}
    print(write("resnet56_memory", result, args.out))


if __name__ == "__main__":
    main()
