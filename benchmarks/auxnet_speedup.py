"""Claim (AuxNet, speed-up over the number of stages K; published numbers not at hand): with AuxNets of one block per
resolution a step becomes shorter with every stage from K = 2 to 4 on ResNet-56, ResNet-110 and WRN-28-10, and the
simulated speed-up is within 10 % of the formula rho(K) of the paper with the terms of the same costs. Reached: the
first part; the second on ResNet-110, not at all K of the others, where cuts by cost do better than even shares.

    python benchmarks/auxnet_speedup.py

Images of 32x32, costs in multiply-accumulates, cuts by the method's own rule, messages free. The largest AuxNet of a
run is what the formula counts on every device. Everything is simulated, nothing is timed: `auxnet_step_time.py`
measures two ranks, of ResNet-56 and with `--widen` of a wide network that fits this machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, write

from unlatch.advise.prediction import simulate_method
from unlatch.methods import get
from unlatch.methods.auxnet.workload import auxnet_cost
from unlatch.methods.local.speedup import LayerParallelTimes
from unlatch.models import build
from unlatch.models.resnet_cifar import CifarResNet
from unlatch.nn.chain import chain
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.model_costs import model_costs

STAGES = range(2, 9)
NETWORKS = {
    "ResNet-56": lambda: CifarResNet(56),
    "ResNet-110": lambda: CifarResNet(110),
    "WRN-28-10": lambda: build("wrn28-10"),
}


def row(name: str, layers: list[LayerCost], stages: int) -> dict[str, Any]:
    run = simulate_method(get("auxnet"), layers, stages)
    nets = [auxnet_cost(layers, start, 1) for start in run.starts[1:]]
    largest = max(nets, key=lambda net: float(net.work))
    forward, backward = (sum(float(getattr(one, kind)) for one in layers) for kind in ("F", "backward"))
    times = LayerParallelTimes(0.0, forward, backward, 0.0, float(largest.F), float(largest.backward))
    return {
        "network": name,
        "stages": stages,
        "speedup": run.speedup,
        "formula": times.speed_up(stages),
        "limit": times.limit,
        "auxnet_share": float(largest.work) / (forward + backward),
        "split": list(run.split),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    rows = []
    for name, make in NETWORKS.items():
        with torch.device("meta"):
            model = make()
        layers = model_costs(chain(model), torch.empty(128, 3, 32, 32, device="meta"))
        for stages in STAGES:
            one = row(name, layers, stages)
            rows.append(one)
            told = f"{one['speedup']:.2f}, formula {one['formula']:.2f}, AuxNet {one['auxnet_share']:.1%}"
            print(f"{name}, K={stages}: {told}", flush=True)
    print(write("auxnet_speedup", {"rows": rows}, args.out))


if __name__ == "__main__":
    main()
