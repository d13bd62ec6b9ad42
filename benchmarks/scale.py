"""Claim: none; what the simulator says about 8 to 4,096 devices with links of several kinds, for a network of 1,000
equal blocks and for a transformer of 7 billion parameters. Nothing is measured: costs are counted, links are as sold.

    python benchmarks/scale.py [--devices 8 64 512 4096] [--out DIR]

A pipeline has one stage per device, at most one per block; with more devices there are several pipelines, each with its
share of the batch, whose stages add up their gradients in every update (a ring: twice the bytes of the weights over the
link, not hidden behind anything). Memory is `unlatch.plan.memory` for bf16 weights with Adam in fp32 (12 bytes more per
weight), messages on their way left out. All is deterministic, and `docs/scale.md` is written from the result file.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from common import RESULTS, write

from unlatch.advise.prediction import MethodRun, simulate_method
from unlatch.errors import UnlatchError
from unlatch.methods import get
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.memory import layer_sizes, stage_memory
from unlatch.plan.partition import contiguous_split
from unlatch.schedule import Buffers
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DEVICES = (8, 64, 512, 4096)
METHODS = ("1f1b", "zb-h1", "pipedream", "fdg", "dtr", "petra")
#: Bytes per second in each direction and seconds of latency.
LINKS = {
    "NVLink": Channel(450e9, 2e-6),
    "PCIe 4": Channel(25e9, 5e-6),
    "100 GbE": Channel(12.5e9, 20e-6),
    "10 GbE": Channel(1.25e9, 50e-6),
    "home Internet": Channel(3.125e6, 20e-3),  # 25 Mb/s upwards
}
#: Numbers as large as a bf16 weight that Adam keeps: two moments and a copy in fp32.
SLOTS = 6
IMAGE = Path(__file__).parents[1] / "docs" / "img" / "scale.png"


@dataclass(frozen=True)
class Network:
    """Costs of the layers for one sample, the batch, and the speed of a device."""

    name: str
    layers: list[LayerCost]
    batch: int
    input_bytes: float


def blocks(count: int = 1000) -> Network:
    """Equal residual blocks: 0.5 GFLOP per image and pass, 0.8 MB of activations, 2 MB of weights; 30 TFLOP/s."""
    seconds, size = 0.5e9 / 30e12, 0.8e6
    one = [LayerCost(f"b{n}", seconds, seconds, seconds, size, 2e6, kept_bytes=4 * size) for n in range(count)]
    return Network("1,000 blocks", one, 4096, 0.3e6)


def transformer(depth: int = 32, width: int = 4096, inner: int = 11008, words: int = 32000) -> Network:
    """7 B parameters, sequences of 2,048 tokens in bf16; 150 TFLOP/s. Products only, attention included."""
    speed, length = 150e12, 2048
    weights = 4 * width * width + 3 * width * inner
    block = (2 * weights * length + 4 * length * length * width) / speed
    border = 2.0 * length * width
    # What a block keeps without recomputation and without the scores of attention: 34 bytes per number.
    layers = [LayerCost("embed", 0.0, 0.0, 0.0, border, 2.0 * words * width, kept_bytes=8.0 * length)]
    layers += [
        LayerCost(f"block{n}", block, block, block, border, 2.0 * weights, kept_bytes=34.0 * length * width)
        for n in range(depth)
    ]
    head = 2 * words * width * length / speed
    layers.append(LayerCost("head", head, head, head, 4.0 * length * words, 2.0 * words * width, kept_bytes=border))
    return Network("7 B transformer", layers, 1024, 8.0 * length)


def starts_of(network: Network, stages: int) -> list[int]:
    """First layers of the stages: the best cut, which is plain where every layer is a stage or all are equal."""
    if stages > 100:
        return [n * len(network.layers) // stages for n in range(stages)]
    return contiguous_split([float(layer.work) for layer in network.layers], stages)


def memory(run: MethodRun, starts: list[int], input_bytes: float) -> float:
    """Bytes of the fullest device, without messages on their way."""
    found = stage_memory(
        layer_sizes(run.layers, starts, microbatches=run.microbatches, input_bytes=input_bytes),
        run.method.rules(),
        run.costed.schedule,
        microbatches=run.microbatches,
        accumulate=run.method.accumulate,
        delays=run.lateness,
        optimizer_slots=SLOTS,
        under_way=Buffers(run.simulation.in_flight, {}),
    )
    return max(stage.total for stage in found)


def row(network: Network, link: str, devices: int, name: str) -> dict[str, Any]:
    stages = min(devices, len(network.layers))
    replicas = devices // stages
    batch = network.batch // replicas
    known = {"network": network.name, "link": link, "devices": devices, "method": name, "replicas": replicas}
    channel = LINKS[link]
    share = max(layer.weight_bytes for layer in network.layers) * -(-len(network.layers) // stages)
    reduce = 2 * share * (replicas - 1) / replicas / channel.bandwidth + 2 * (replicas - 1) * channel.latency
    layers = [
        LayerCost(
            one.name,
            one.F * batch,
            one.D * batch,
            one.G * batch,
            one.activation_bytes * batch,
            one.weight_bytes,
            kept_bytes=float(one.kept_bytes or 0) * batch,
        )
        for one in network.layers
    ]
    starts = starts_of(network, stages)
    split = [layers[start].name for start in starts[1:]]
    machine = Machine(channel, update=reduce)
    try:
        run = simulate_method(get(name), layers, stages, split=split, batch_size=batch, machine=machine)
    except UnlatchError as error:
        return known | {"stages": stages, "reason": str(error).splitlines()[0]}
    seconds = run.time_per_batch
    ideal = sum(float(layer.work) for layer in layers) / stages
    return known | {
        "stages": stages,
        "microbatches": run.microbatches,
        "samples_per_s": batch * replicas / seconds,
        "utilisation": ideal / seconds * (replicas * stages / devices),
        "memory_bytes": memory(run, starts, network.input_bytes * batch),
        "staleness": max(run.lateness) / run.method.per_update,
        "reason": None,
    }


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each network, link and number of devices: the fastest of all, the fastest exact one, the smallest."""
    found = []
    for key in dict.fromkeys((r["network"], r["link"], r["devices"]) for r in rows):
        mine = [r for r in rows if (r["network"], r["link"], r["devices"]) == key and r["reason"] is None]
        exact = [r for r in mine if r["staleness"] == 0]
        found.append(
            {
                "network": key[0],
                "link": key[1],
                "devices": key[2],
                "fastest": max(mine, key=lambda r: r["samples_per_s"])["method"] if mine else None,
                "fastest_exact": max(exact, key=lambda r: r["samples_per_s"])["method"] if exact else None,
                "smallest": min(mine, key=lambda r: r["memory_bytes"])["method"] if mine else None,
            }
        )
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    networks, links = list(dict.fromkeys(r["network"] for r in rows)), list(LINKS)
    figure, axes = plt.subplots(
        len(networks), len(links), figsize=(3.2 * len(links), 3.2 * len(networks)), layout="constrained", squeeze=False
    )
    for line, network in zip(axes, networks, strict=True):
        for axis, link in zip(line, links, strict=True):
            for number, name in enumerate(METHODS):
                mine = [r for r in rows if (r["network"], r["link"], r["method"]) == (network, link, name)]
                mine = [r for r in mine if r["reason"] is None]
                axis.plot(
                    [r["devices"] for r in mine],
                    [100 * r["utilisation"] for r in mine],
                    marker="os^vDx"[number % 6],
                    markerfacecolor="none",
                    color=f"C{number}",
                    label=name,
                )
            axis.set(title=f"{network}, {link}", xscale="log", ylim=(0, 105))
            axis.title.set_fontsize(9)
            axis.grid(alpha=0.25)
    for line in axes:
        line[0].set_ylabel("useful work, % of all devices")
    for axis in axes[-1]:
        axis.set_xlabel("devices")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=list(DEVICES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    rows = []
    for network in (blocks(), transformer()):
        for devices in args.devices:
            for link in LINKS:
                for name in args.methods:
                    start = time.perf_counter()
                    rows.append(row(network, link, devices, name))
                    one = rows[-1]
                    said = one["reason"] or f"{one['samples_per_s']:12.2f}/s, {one['utilisation']:6.1%}"
                    took = time.perf_counter() - start
                    print(f"{network.name:16} {devices:5} {link:14} {name:10} {said}  ({took:.1f} s)", flush=True)
    result = {"rows": rows, "best": best(rows)}
    path = write("scale", result, args.out)
    draw(rows, IMAGE if args.out == RESULTS else args.out / "scale.png")
    print(path)


if __name__ == "__main__":
    main()
