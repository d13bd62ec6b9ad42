"""Claim (DTR, Tables 1 and 7; PETRA, Table 1 and its throughput table): on equal stages the simulator gives the times
per batch that follow from what each method does, and on the cuts of the FDG repository it gives, within 10 %, the
speed-ups over backpropagation that were published there for WRN-28-10 with K = 2, 3 and 4.

    python benchmarks/decoupled_speed.py

Reached: the first part, but for `ddg` and `fr`, which overlap forwards here. The second only for `dgl` and `fdg` at
K = 2: their devices were not busy all the time, and messages are free here.

*Ideal*: K equal stages, a forward takes 1, a backward 2, in all stages; messages are free. Beside it what was derived
from the definitions of `ddg` and `fr`, which send every batch through all modules before the next one begins; the
library trains the same weights in an order that overlaps forwards. *Networks*: ResNet-56 and WRN-28-10 for images of
32x32, costs in multiply-accumulates; the published cuts of K = 2 to 4 where they are known, else the cut with the least
longest stage. One device per stage, batches uncut. *RevNets*: one block per stage, as in the
paper, against the same network going forward and back (with its second forward) one stage at a time. Data parallel
training divides the work by K, its messages free like all others. Everything is simulated, nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write

from unlatch.advise.prediction import MethodRun, simulate_method
from unlatch.methods import get
from unlatch.models import build
from unlatch.models.resnet_cifar import CifarResNet
from unlatch.models.revnet import RevNet, revnet18, revnet34
from unlatch.nn.chain import chain
from unlatch.plan.layer_costs import LayerCost, total_work
from unlatch.plan.model_costs import model_costs
from unlatch.plan.partition import contiguous_split

METHODS = ("bp", "ddg", "fr", "dgl", "fdg", "dsp", "dtr", "dtrp")
STAGES = range(2, 9)
CUTS = {
    ("ResNet-56", 2): ["layer2.4"],
    ("ResNet-56", 3): ["layer2.0", "layer3.0"],
    ("ResNet-56", 4): ["layer1.6", "layer2.4", "layer3.2"],
    ("WRN-28-10", 2): ["layer2.2"],
    ("WRN-28-10", 3): ["layer2.0", "layer3.0"],
}
#: Seconds per epoch in the table of the FDG repository, the same group's, for K = 2, 3, 4.
PUBLISHED = {
    "ResNet-56": {
        "bp": [30.2, 30.2, 30.2],
        "ddg": [30.0, 28.9, 27.7],
        "fr": [39.3, 36.4, 36.5],
        "dgl": [33.2, 32.5, 34.4],
        "data parallel": [32.5, 33.5, 36.3],
        "fdg": [29.6, 27.0, 27.3],
    },
    "WRN-28-10": {
        "bp": [219.1, 219.1, 219.1],
        "ddg": [160.3, 139.3, 133.9],
        "fr": [208.2, 173.4, 151.9],
        "dgl": [118.4, 82.6, 72.4],
        "data parallel": [126.9, 102.1, 84.0],
        "fdg": [118.3, 89.6, 74.1],
    },
}


def simulated(name: str, layers: Sequence[LayerCost], stages: int, split: Sequence[str] | None) -> MethodRun:
    return simulate_method(get(name, microbatches=1), layers, stages, split=split)


def ideal(stages: int) -> dict[str, float]:
    """Speed-ups over one device, all stages equal."""
    # A layer before the first stage is free: it lets that stage have an input gradient like the others.
    layers = [LayerCost("data", 0, 0, 0), *(LayerCost(str(n), 1, 1, 1) for n in range(stages))]
    split = [str(n) for n in range(1, stages)]
    # What the heads of `dgl` take depends on the network.
    shown = [name for name in (*METHODS, "petra") if name != "dgl"]
    found = {name: simulated(name, layers, stages, split).speedup for name in shown}
    locked = {"ddg, forward locked": 3 / (1 + 2 / stages), "fr, forward locked": 3 / (1 + 3 / stages)}
    return {**found, **locked, "data parallel": float(stages)}


def network(name: str) -> list[LayerCost]:
    with torch.device("meta"):
        model = CifarResNet(56) if name == "ResNet-56" else build("wrn28-10")
    return model_costs(chain(model), torch.empty(128, 3, 32, 32, device="meta"))


def even_cut(layers: Sequence[LayerCost], stages: int) -> list[str]:
    starts = contiguous_split([float(layer.work) for layer in layers], stages)
    return [layers[start].name for start in starts[1:]]


def over_stages(name: str) -> list[dict[str, Any]]:
    layers, rows = network(name), []
    for stages in STAGES:
        split = CUTS.get((name, stages)) or even_cut(layers, stages)
        for method in METHODS:
            run = simulated(method, layers, stages, split)
            rows.append(_row(name, method, stages, run.speedup) | {"split": list(run.split)})
        own = simulated("dtr", layers, stages, None)
        rows.append(_row(name, "dtr, its own cut", stages, own.speedup) | {"split": list(own.split)})
        rows.append(_row(name, "data parallel", stages, float(stages)))
    return rows


def _row(name: str, method: str, stages: int, speedup: float) -> dict[str, Any]:
    row: dict[str, Any] = {"network": name, "method": method, "stages": stages, "speedup": speedup}
    seconds = PUBLISHED[name].get(method)
    if seconds and 2 <= stages <= 4:
        row["published"] = PUBLISHED[name]["bp"][stages - 2] / seconds[stages - 2]
    return row


def reversible(name: str, make: Any) -> dict[str, Any]:
    """PETRA with a block per stage, against the same reversible work done by one stage after the other."""
    with torch.device("meta"):
        model: RevNet = make(classes=10, stem="small")
    layers = model_costs(chain(model), torch.empty(64, 3, 32, 32, device="meta"))
    run = simulated("petra", layers, len(layers), [layer.name for layer in layers[1:]])
    again = sum(float(layer.F) for layer in layers[:-1])
    work = float(total_work(layers))
    return {
        "network": name,
        "stages": len(layers),
        "speedup": run.speedup,
        "over_serial_reversible": (work + again) / run.time_per_batch,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    result = {
        "ideal": {str(stages): ideal(stages) for stages in STAGES},
        "rows": [row for name in PUBLISHED for row in over_stages(name)],
        "reversible": [reversible("RevNet-18", revnet18), reversible("RevNet-34", revnet34)],
    }
    for stages, found in result["ideal"].items():
        print(f"ideal, K={stages}: " + ", ".join(f"{name} {speed:.2f}" for name, speed in found.items()))
    for row in result["rows"]:
        told = f", published {row['published']:.2f}" if "published" in row else ""
        print(f"{row['network']}, K={row['stages']}, {row['method']}: {row['speedup']:.2f}{told}")
    for row in result["reversible"]:
        print(f"{row['network']}, {row['stages']} stages: {row['over_serial_reversible']:.2f}")
    print(write("decoupled_speed", result, args.out))


if __name__ == "__main__":
    main()
