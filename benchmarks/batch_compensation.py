"""Claim (DTR, Figures 4 to 6: module imbalance, what devices do, utilisation without and with batch compensation): cuts
that balance forward and backward leave the last stage of `dtr` idle, since it alone runs no forward twice, and a cut by
the method's own costs leaves less; and where a batch is too small for a device, joining m batches raises the mean
utilisation at every K = 2 to 8. Reached, but for the own cut at K = 7, which is as fast and keeps devices less busy.

    python benchmarks/batch_compensation.py

ResNet-56 for batches of 128 images of 32x32, costs in multiply-accumulates. What a device loses on small batches is
inferred: every pass over a block takes a fixed time more, however few its images, so long that one device under
backpropagation is busy for 57 % of the time, as the FDG repository reports for this network on one GPU. Joining m
batches pays it once for m of them. Utilisation is the share of its time in which a device computes, second forwards
included. Everything is simulated, nothing is timed; `compensate="auto"` measures the real thing on a machine of yours.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import RESULTS, write
from decoupled_speed import CUTS, even_cut, network

from unlatch.advise.prediction import MethodRun, simulate_method
from unlatch.methods import get
from unlatch.plan.layer_costs import LayerCost

STAGES, JOINED = range(2, 9), (1, 2, 4, 8)
BUSY = 0.57
NETWORK, METHOD = "ResNet-56", "dtr"
#: Stages whose devices are shown at work, for so many batches.
SHOWN, BATCHES = 4, 4


def loaded(layers: Sequence[LayerCost], joined: int) -> list[LayerCost]:
    """Costs of `joined` batches as one, with the fixed time of every pass over a block."""
    fixed = (1 / BUSY - 1) * sum(float(layer.work) for layer in layers) / sum(_passes(layer) for layer in layers)

    def cost(work: Any) -> float:
        return joined * float(work) + (fixed if work else 0.0)

    return [LayerCost(one.name, cost(one.F), cost(one.D), cost(one.G)) for one in layers]


def _passes(layer: LayerCost) -> int:
    return sum(1 for work in (layer.F, layer.D, layer.G) if work)


def run_of(layers: Sequence[LayerCost], stages: int, split: Sequence[str] | None) -> MethodRun:
    return simulate_method(get(METHOD, microbatches=1), layers, stages, split=split)


def loads(layers: Sequence[LayerCost], starts: Sequence[int]) -> list[float]:
    """Work of each stage in a tick, second forwards included."""
    ends = (*starts[1:], len(layers))
    parts = [layers[a:b] for a, b in zip(starts, ends, strict=True)]
    again = [*(sum(float(one.F) for one in part) for part in parts[:-1]), 0.0]
    return [sum(float(one.work) for one in part) + more for part, more in zip(parts, again, strict=True)]


def window(run: MethodRun) -> list[list[Any]]:
    """What every device does while a few batches enter, once the pipeline is full: device, kind, batch, start and end
    in units of the time per batch."""
    spans, pace = list(run.simulation.spans()), run.time_per_batch
    middle = len(run.simulation.groups) // 2
    first = min(span.start for span in spans if span.batch == middle)
    clipped = [
        (span, max(0.0, (span.start - first) / pace), min(float(BATCHES), (span.end - first) / pace)) for span in spans
    ]
    return [[span.device, span.kind, span.batch - middle, start, end] for span, start, end in clipped if end > start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    layers = network(NETWORK)
    imbalance, utilisation, shown = [], [], []
    for stages in STAGES:
        split = CUTS.get((NETWORK, stages)) or even_cut(layers, stages)
        for name, where in (("forward and backward balanced", split), ("its own cut", None)):
            run = run_of(layers, stages, where)
            work = loads(layers, run.starts)
            shares = [one / run.time_per_batch for one in work]
            row = {"cut": name, "stages": stages, "busy": shares, "mean": mean(shares), "split": list(run.split)}
            imbalance.append(row)
            if stages == SHOWN:
                shown.append({"cut": name, "spans": window(run)})
            print(f"K={stages}, {name}: {', '.join(f'{share:.2f}' for share in shares)}, mean {mean(shares):.2f}")
        for joined in JOINED:
            run = run_of(loaded(layers, joined), stages, None)
            work = [joined * one for one in loads(layers, run.starts)]
            shares = [one / run.time_per_batch for one in work]
            row = {
                "joined": joined,
                "stages": stages,
                "busy": shares,
                "mean": mean(shares),
                "time": run.time_per_batch / joined,
            }
            utilisation.append(row)
            print(f"K={stages}, {joined} joined: {', '.join(f'{share:.2f}' for share in shares)}")
    result = {
        "imbalance": imbalance,
        "utilisation": utilisation,
        "devices_at_work": shown,
        "busy_under_bp": BUSY,
        "network": NETWORK,
    }
    print(write("batch_compensation", result, args.out))


if __name__ == "__main__":
    main()
