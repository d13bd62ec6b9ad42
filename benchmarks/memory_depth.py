"""Claim: the bytes that the planner predicts for a stage (`unlatch.plan.memory`) are within 10 % of what live tensors
take at the worst moment, for every method that sends gradients between stages, on ResNets of 20, 56 and 110 layers in
2, 4 and 8 stages. Reached: 0.95 to 1.06 in all 180 cells.

    python benchmarks/memory_depth.py [--depths 20 56 110] [--stages 2 4 8] [--methods pipedream dtr] [--limit 200]

Finished cells are lines of memory_depth.jsonl; what is there is not measured again. Bytes do not depend on the load of
the machine. Without ranks it takes about 10 minutes, with them an hour. Methods with local losses are not part of it:
the networks that they have beside stages need samples to be built, and are none of `plan.memory`.

*Live tensors* (any number of stages, inline): what the runtime holds for batches under way at each stage, graph of the
backward at work included, plus weights, other versions of them, gradients, and the state of the optimizer. Messages
that wait are left out on both sides: how many wait depends on timing, the schedule only bounds them. Methods that
reverse train a RevNet of the same depth.

*Resident memory* (2 ranks): growth of the process from before the run is built to its peak. It has everything else as
well: libraries, workspaces of convolutions, fragments.

*The largest model* within `--limit` MB of live tensors per rank, on 2 ranks: residual blocks of fixed width, as many as
fit, method by method, found by the prediction that the first part confirms; against backpropagation in one process and
activation checkpointing of every block (`torch.utils.checkpoint`), measured. RevLib is not part of it:
it reverses blocks in one process, and keeps what it needs where hooks on saved tensors do not see it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib
import torch
from common import RESULTS, Finished, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import unlatch
from unlatch.errors import UnlatchError
from unlatch.methods import Method, get, names
from unlatch.models.resnet_cifar import CifarResNet
from unlatch.models.revnet import revnet_cifar, revnet_fixed
from unlatch.nn.chain import chain, cut
from unlatch.nn.tree import map_tensors
from unlatch.plan.memory import StageMemory, stage_memory, stage_sizes
from unlatch.runtime.metering import PeakMeter
from unlatch.throughput.resident import PeakResident

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGE = Path(__file__).parents[1] / "docs" / "img" / "memory_depth.png"
DEPTHS, STAGES = (20, 56, 110), (2, 4, 8)
BATCH, SIDE, WIDTH = 16, 32, 32
#: Blocks beyond which nothing is tried.
LARGEST = 4096
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
SLOTS = 1


def model(depth: int, reverses: bool) -> nn.Module:
    torch.manual_seed(0)
    return revnet_cifar(depth) if reverses else CifarResNet(depth)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(10, (BATCH,))


def lasting(sizes: Sequence[StageMemory], copies: Sequence[int]) -> list[float]:
    """Bytes of weights, buffers, gradients, optimizer and other versions."""
    return [
        s.parameters * (1 + number) + s.buffers + s.gradients + s.optimizer
        for s, number in zip(sizes, copies, strict=True)
    ]


def predicted(network: nn.Module, method: Method, starts: Sequence[int]) -> list[StageMemory]:
    """From shapes, the schedule and the rules; what autograd keeps of each stage is measured in one forward."""
    x: Any = batch()[0][: BATCH // method.per_batch]
    sizes = []
    for size, part in zip(stage_sizes(network, x, starts), cut(chain(network), starts), strict=True):
        module = nn.Sequential(*(block.module for block in part))
        meter = PeakMeter([*module.parameters(), *module.buffers()])
        with meter.measuring():
            out = module(x)
            kept = meter.peak
        sizes.append(replace(size, graph_bytes=kept))
        x = map_tensors(lambda tensor: tensor.detach().requires_grad_(), out)
    return stage_memory(
        sizes,
        method.rules(),
        method.schedule(len(starts)),
        microbatches=method.per_batch,
        accumulate=method.accumulate,
        delays=method.lateness(len(starts)),
        optimizer_slots=SLOTS,
    )


def train(
    method: Method, depth: int, stages: int, split: Literal["auto"] | Sequence[str] = "auto"
) -> tuple[list[float], list[float]]:
    """Train until the pipeline is full. **Returns:** predicted and measured bytes of every stage, messages left out."""
    network = model(depth, method.inverts)
    with unlatch.parallelize(
        network, method, stages=stages, split=split, loss_fn=cross_entropy, optimizer=SGD, distributed=False
    ) as run:
        starts, chosen = run.plan.starts, run.method
        for _ in range(3 + 2 * -(-run.schedule.depth // chosen.per_batch)):
            run.step(*batch())
        run.flush()
        found = run.statistics()
    theory = predicted(model(depth, method.inverts), chosen, starts)
    measured = lasting(theory, [s.weight_copies for s in found])
    measured = [fixed + s.peak_bytes for fixed, s in zip(measured, found, strict=True)]
    return [stage.total - stage.messages for stage in theory], measured


def resident(name: str, depth: int) -> int | None:
    """Growth of this rank's resident memory."""
    torch.set_num_threads(1)
    method, meter = get(name), PeakResident()
    with (
        meter.measuring(),
        unlatch.parallelize(
            model(depth, method.inverts), method, stages=2, loss_fn=cross_entropy, optimizer=SGD
        ) as run,
    ):
        for _ in range(6):
            run.step(*batch())
        run.flush()
    return meter.bytes


def row(name: str, depth: int, stages: int) -> dict[str, Any]:
    try:
        theory, measured = train(get(name), depth, stages)
    except UnlatchError as error:
        return {"predicted": [], "measured": [], "ratio": None, "reason": str(error).splitlines()[0]}
    return {"predicted": theory, "measured": measured, "ratio": max(theory) / max(measured), "reason": None}


def grown(name: str, depth: int) -> dict[str, Any]:
    """Resident memory, in fresh processes each time, since it hardly shrinks."""
    try:
        return {"bytes": unlatch.launch(resident, 2, args=(name, depth)), "reason": None}
    except UnlatchError as error:
        return {"bytes": None, "reason": str(error).splitlines()[0]}


# ------------------------------------------------------------------------- the largest model


def blocks_of(count: int, reverses: bool) -> nn.Module:
    """A stem, `count` residual or reversible blocks of one width, and a head."""
    if reverses:
        return revnet_fixed(count, width=WIDTH // 2)
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, padding=1),
        *(Residual() for _ in range(count)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10)),
    )


class Residual(nn.Module):
    """Two convolutions with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False),
            nn.BatchNorm2d(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def alone(count: int, again: bool) -> float:
    """Bytes of one process: weights, gradients, optimizer, and the most that autograd holds in forward and backward."""
    network = blocks_of(count, reverses=False)
    parameters = list(network.parameters())
    meter = PeakMeter([*parameters, *network.buffers()])
    x, y = batch()
    with meter.measuring():
        for layer in network.children():
            x = checkpoint(layer, x, use_reentrant=False) if again and isinstance(layer, Residual) else layer(x)
        cross_entropy(x, y).backward()
    weights = sum(p.nbytes for p in parameters)
    return meter.peak + weights * (2 + SLOTS)


def on_ranks(name: str, count: int) -> float:
    """Predicted bytes of the fuller one of two ranks."""
    method = get(name).resolve(2, BATCH)
    network = blocks_of(count, method.inverts)
    starts = [0, (len(chain(network)) + 1) // 2]
    return max(stage.total - stage.messages for stage in predicted(network, method, starts))


def most_blocks(size: Callable[[int], float], limit: float) -> int:
    """The largest number of blocks within the limit, by bisection; 0 if not even two fit."""
    low, high = 0, 2
    while size(high) <= limit:
        low, high = high, 2 * high
        if high > LARGEST:
            return low
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low


def largest(methods: Sequence[str], limit: float, done: Finished) -> list[dict[str, Any]]:
    found = [
        done.once(partial(most_alone, limit, again), part="largest", system=system, limit=limit)
        for system, again in (("bp, one process", False), ("bp, one process, every block checkpointed", True))
    ]
    found += [
        done.once(partial(most_on_ranks, name, limit), part="largest", system=name, limit=limit) for name in methods
    ]
    return found


def most_alone(limit: float, again: bool) -> dict[str, Any]:
    return {"blocks": most_blocks(partial(alone, again=again), limit), "note": "measured"}


def most_on_ranks(name: str, limit: float) -> dict[str, Any]:
    try:
        count = most_blocks(partial(on_ranks, name), limit)
    except UnlatchError as error:
        return {"blocks": 0, "note": str(error).splitlines()[0]}
    return {"blocks": count, "note": "predicted, 2 ranks" + ("; still fits" if count >= LARGEST // 2 else "")}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    counts = sorted({row["stages"] for row in rows})
    figure, axes = plt.subplots(1, len(counts), figsize=(5.6 * len(counts), 5), layout="constrained", squeeze=False)
    for axis, stages in zip(axes[0], counts, strict=True):
        lines = alike([row for row in rows if row["stages"] == stages and row["measured"]])
        top = max(line[-1][1] for line in lines.values())
        ends: list[float] = []
        for number, (label, line) in enumerate(sorted(lines.items(), key=lambda item: item[1][-1][1])):
            depths, measured, predicted = zip(*line, strict=True)
            axis.plot(depths, measured, marker="o", markersize=4, color=f"C{number % 10}")
            axis.plot(depths, predicted, linestyle=":", color=f"C{number % 10}")
            ends.append(max([measured[-1], *(end + 0.045 * top * (1 + label.count(chr(10))) for end in ends[-1:])]))
            axis.text(depths[-1] * 1.03, ends[-1], label, color=f"C{number % 10}", fontsize=7, va="center")
        axis.set(title=f"{stages} stages (dotted: predicted)", xlabel="layers", ylabel="MB at the fullest stage")
        axis.set_xlim(right=depths[-1] * 1.75)
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def alike(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """Depth, measured and predicted MB; methods that differ by less than 3 % share a line."""
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        line = [(row["depth"], max(row["measured"]) / 1e6, max(row["predicted"]) / 1e6) for row in mine]
        same = [label for label, other in lines.items() if abs(other[-1][1] / line[-1][1] - 1) < 0.03]
        if same:
            lines[f"{same[0]}, {name}"] = lines.pop(same[0])
        else:
            lines[name] = line
    return {fill(label, 34): line for label, line in lines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=list(DEPTHS))
    parser.add_argument("--stages", type=int, nargs="*", default=list(STAGES))
    parser.add_argument("--methods", nargs="*", default=[name for name in names() if get(name).gradient != "local"])
    parser.add_argument("--limit", type=float, default=200.0, help="MB per rank for the largest model")
    parser.add_argument("--no-ranks", action="store_true", help="leave out resident memory on ranks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done, limit = Finished(args.out / "memory_depth.jsonl"), 1e6 * args.limit
    rows = []
    for name in args.methods:
        for depth in args.depths:
            for stages in args.stages:
                key = {"method": name, "depth": depth, "stages": stages}
                one = done.once(partial(row, name, depth, stages), part="live", **key)
                rows.append(one)
                said = one["reason"] or f"{max(one['measured']) / 1e6:8.1f} MB, predicted / measured {one['ratio']:.3f}"
                print(f"{name:15} {depth:4} layers, {stages} stages: {said}", flush=True)
    growth = []
    for name in [] if args.no_ranks else args.methods:
        for depth in args.depths:
            growth.append(done.once(partial(grown, name, depth), part="resident", method=name, depth=depth))
            print(f"{name:15} {depth:4} layers, 2 ranks: resident {growth[-1]['bytes']}", flush=True)
    result = {
        "rows": rows,
        "resident": growth,
        "limit_bytes": limit,
        "largest": largest(args.methods, limit, done),
    }
    for one in result["largest"]:
        print(f"{one['system']:42} {one['blocks']:6} blocks within {args.limit:g} MB  ({one['note']})")
    path = write("memory_depth", result, args.out)
    draw(rows, IMAGE if args.out == RESULTS else path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
