"""Claim: on 2 ranks, ResNet-20 on CIFAR-10, everything but the system equal (batch, optimizer, schedule, epochs, data
order), pipedream, fdg and layerpipe reach 95 % of the final accuracy of one-thread BP at least 1.4 times as soon as it
does, and sooner than the best of torch's own 1F1B with 2, 4 and 8 micro-batches; dtr and dtrp at least 1.3 times as
soon; on a RevNet petra at least 1.3 times as soon as its own BP. No pipeline is expected to be sooner than DDP, whose
gradients are not late and whose speed on this network is that of two independent processes.

    python benchmarks/wall_clock.py --data-dir DIR [--images 10000] [--epochs 4] [--seeds 3] [--full-stem]

10,000 training images, 4 epochs, batch 128, one cycle to lr 0.1 with 20 % warm-up, Nesterov momentum 0.9, decay 5e-4 on
weights, pad-4 crop and flip, bf16, a stem of stride 2 (`--full-stem`: stride 1, about 4 times as long). Methods of ours
have their defaults. Far from trained to the end: this is about the way there.

Points (seconds, test accuracy) are taken at the ends of epochs, pipelines empty. On the clock is what ranks do between
two barriers: steps, messages, and emptying the pipeline. Off the clock are start, planning, making the batches of an
epoch, and evaluation, which is the same for all: the weights are collected and tested by plain PyTorch on the first
5,000 test images. Accuracies between points are interpolated, from chance at 0 seconds on. The accuracy to reach is one
number for all systems on a network: 95 % of the mean final accuracy of one-thread BP there.

Rounds are interleaved: one seed of every system per round, and ratios are to one-thread BP in the same round. Before
each run a step of one-thread BP is timed; where these differ by more than a few percent the machine was not idle, and
the table says so. Finished runs are lines of wall_clock.jsonl; what is there is not run again unless it is deleted.

Estimate, idle machine, 1,300 images/s for a core: 31 s of one-thread BP and about 18 s of anything on two cores make
5 minutes a round with 15 systems, and 1.5 minutes of evaluation, planning and batches; 20 minutes for 3 rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from accuracy_common import decay_weights_only, triangular
from common import RESULTS, Finished, spread, write
from torch import nn
from torch.nn.functional import cross_entropy

from unlatch.data import Loader, TensorData, load
from unlatch.errors import UnlatchError
from unlatch.methods import get
from unlatch.models import build
from unlatch.throughput import DDP, Ours, Plain, Subject, System, TorchPipeline, lasting_ranks

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RANKS, CHANCE, SHARE = 2, 10.0, 0.95
RESNET, REVNET = "resnet20", "revnet20"
OWN = ("pipedream", "fdg", "layerpipe", "dtr", "dtrp", "zb-h1", "1f1b")
#: Every system with the network that it trains; on each network one-thread BP, which others are compared with, first.
FIELD: tuple[tuple[System, str], ...] = (
    (Plain(), RESNET),
    (Plain(RANKS), RESNET),
    (DDP(), RESNET),
    *((TorchPipeline("1f1b", parts), RESNET) for parts in (2, 4, 8)),
    *((Ours(get(name)), RESNET) for name in OWN),
    (Plain(), REVNET),
    (Ours(get("petra")), REVNET),
)
#: Seconds after which a run counts as stuck.
PATIENCE = 3600.0

Row = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """What all systems have in common."""

    folder: str
    images: int
    test: int
    epochs: int
    batch: int
    lr: float
    stem_stride: int
    precision: str

    @property
    def settings(self) -> Row:
        """What a finished run must agree in to count as one of these."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def loader(self, seed: int) -> Loader:
        return Loader(
            pictures(self)[0], self.batch, shuffle=True, seed=seed, augment=True, drop_last=True, channels_last=True
        )

    def subject(self, network: str, seed: int) -> Subject:
        return Subject(
            partial(model, network, self.stem_stride, seed),
            partial(first_batch, self, seed),
            cross_entropy,
            partial(decay_weights_only, lr=self.lr, decay=5e-4, nesterov=True),
            "bf16" if self.precision == "bf16" else "fp32",
            partial(triangular, total=self.epochs * (self.images // self.batch)),
        )


@cache
def pictures(recipe: Recipe) -> tuple[TensorData, TensorData]:
    training, test = load("cifar10", recipe.folder, train_size=recipe.images)
    return training, test.take(torch.arange(recipe.test))


def first_batch(recipe: Recipe, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return recipe.loader(seed).batch(0, 0)


def model(network: str, stem_stride: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return build(network, stem_stride=stem_stride).to(memory_format=torch.channels_last)


# ----------------------------------------------------------------------------------- on ranks


def course(system: System, recipe: Recipe, network: str, seed: int) -> Row:
    """On a rank: train, and on the first one tell how far it came when."""
    rank, seconds, points = dist.get_rank(), 0.0, []
    subject, loader = recipe.subject(network, seed), recipe.loader(seed)
    torch.set_num_threads(1)
    reference = reference_step(recipe) if rank == 0 else 0.0
    dist.barrier()
    torch.set_num_threads(system.threads)
    training = system.start(subject)
    for epoch in range(recipe.epochs):
        batches = [loader.batch(epoch, number) for number in range(len(loader))] if training is not None else []
        dist.barrier()
        begun = time.perf_counter()
        if training is not None:
            for batch in batches:
                training.feed(batch)
                training.step()
            training.flush()
        dist.barrier()
        seconds += time.perf_counter() - begun
        weights = training.weights() if training is not None else {}
        if rank == 0:
            points.append((seconds, accuracy(subject, weights, pictures(recipe)[1])))
            torch.set_num_threads(system.threads)
    if training is not None:
        training.close()
    torch.set_num_threads(1)
    return {"points": points, "reference_seconds": reference}


def reference_step(recipe: Recipe, steps: int = 6) -> float:
    """Median seconds of a step of BP with one thread, the other rank waiting."""
    subject = recipe.subject(RESNET, seed=0)
    training, times = Plain().start(subject), []
    assert training is not None
    for _ in range(2 + steps):
        begun = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def accuracy(subject: Subject, weights: dict[str, torch.Tensor], test: TensorData) -> float:
    """Percent of the test images, by plain PyTorch; no clock runs, so that all cores may help."""
    torch.set_num_threads(RANKS)
    network = subject.whole()
    network.load_state_dict(weights)
    network.eval()
    right = 0
    with torch.inference_mode(), subject.casting():
        for x, y in Loader(test, 500, channels_last=True):
            right += int((network(x).argmax(1) == y).sum())
    return 100.0 * right / len(test)


# ------------------------------------------------------------------------------------ results


def label(system: System, network: str) -> str:
    return str(system) if network == RESNET else f"{system}, RevNet-20"


class Runs:
    """Finished runs by this recipe."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self._lines, self._settings = Finished(path), recipe.settings

    @property
    def rows(self) -> list[Row]:
        return [row for row in self._lines.rows if row["settings"] == self._settings]

    def find(self, system: str, seed: int) -> Row | None:
        return self._lines.find(system=system, seed=seed, settings=self._settings)

    def add(self, row: Row) -> None:
        self._lines.add(row | {"settings": self._settings})


def measure(recipe: Recipe, field: Sequence[tuple[System, str]], seeds: int, runs: Runs) -> dict[str, str]:
    """All runs that are not there yet. **Returns:** the reasons of systems that cannot."""
    reasons: dict[str, str] = {}
    fitted: dict[str, System] = {}
    with lasting_ranks(RANKS, PATIENCE) as run:
        for seed in range(seeds):
            for system, network in field:
                name = label(system, network)
                if name in reasons or runs.find(name, seed) is not None:
                    continue
                load_before = os.getloadavg()[0]
                try:
                    if name not in fitted:
                        fitted[name] = system.fitted(recipe.subject(network, seed), RANKS)
                    found = run(course, fitted[name], recipe, network, seed)[0]
                except UnlatchError as error:
                    reasons[name] = str(error).strip().splitlines()[0]
                    print(f"seed {seed}  {name:32} {reasons[name]}", flush=True)
                    continue
                cut = fitted[name].cut
                runs.add({"system": name, "network": network, "seed": seed, "cut": cut, "load": load_before, **found})
                seconds, reached = found["points"][-1]
                print(f"seed {seed}  {name:32} {seconds:7.1f} s  {reached:6.2f} %", flush=True)
    return reasons


def seconds_to(points: Sequence[Sequence[float]], wanted: float) -> float | None:
    """When an accuracy was first reached, between points by interpolation; `None` if never.

    >>> seconds_to([(10.0, 30.0), (20.0, 50.0)], 40.0)
    15.0
    """
    for (before, low), (after, high) in pairwise([(0.0, CHANCE), *points]):
        if high >= wanted:
            return after if high == low else before + (after - before) * (wanted - low) / (high - low)
    return None


def summary(field: Sequence[tuple[System, str]], seeds: int, runs: Runs, reasons: dict[str, str]) -> list[Row]:
    """One row per system, with ratios to one-thread BP of the same network and round."""
    rows = []
    targets = {network: SHARE * _mean_final(runs, label(Plain(), network), seeds) for _, network in field}
    for system, network in field:
        name, base = label(system, network), label(Plain(), network)
        pairs = [(runs.find(name, seed), runs.find(base, seed)) for seed in range(seeds)]
        both = [(mine, other) for mine, other in pairs if mine is not None and other is not None]
        row: Row = {"system": name, "network": network, "target": targets[network], "seeds": len(both)}
        if name in reasons or not both:
            rows.append(row | {"reason": reasons.get(name, "not run")})
            continue
        times = [
            (seconds_to(mine["points"], targets[network]), seconds_to(other["points"], targets[network]))
            for mine, other in both
        ]
        reached = [mine for mine, _ in times if mine is not None]
        sooner = [other / mine for mine, other in times if mine is not None and other is not None]
        rows.append(
            row
            | {
                "seconds": spread([mine["points"][-1][0] for mine, _ in both]),
                "speed": spread([other["points"][-1][0] / mine["points"][-1][0] for mine, other in both]),
                "accuracy": spread([mine["points"][-1][1] for mine, _ in both]),
                "mean_accuracy": statistics.fmean(mine["points"][-1][1] for mine, _ in both),
                "seconds_to_target": spread(reached) if reached else None,
                "sooner": spread(sooner) if sooner else None,
                "reached": len(reached),
                "reference_seconds": spread([mine["reference_seconds"] for mine, _ in both]),
            }
        )
    return rows


def _mean_final(runs: Runs, name: str, seeds: int) -> float:
    found = [row["points"][-1][1] for seed in range(seeds) if (row := runs.find(name, seed)) is not None]
    if not found:
        raise SystemExit(f"{name} has no finished run, and all others are compared with it")
    return statistics.fmean(found)


def noise(runs: Runs) -> Row:
    """How even the machine was: seconds of the reference step before each run, and the load."""
    times = [row["reference_seconds"] for row in runs.rows]
    return {
        "reference_seconds": spread(times),
        "slowest_over_fastest": max(times) / min(times),
        "load": spread([row["load"] for row in runs.rows]),
    }


def show(rows: Sequence[Row]) -> None:
    print(f"{'system':32} {'seconds':>8} {'speed':>6} {'accuracy':>9} {'to target':>10} {'sooner':>7}  range")
    for row in rows:
        if "reason" in row:
            print(f"{row['system']:32} {row['reason']}")
            continue
        start = f"{row['system']:32} {row['seconds']['median']:8.1f} {row['speed']['median']:6.2f}"
        told = f"never, {row['target']:.1f} %"
        if row["sooner"] is not None:
            sooner = row["sooner"]
            told = f"{row['seconds_to_target']['median']:9.1f}s {sooner['median']:7.2f}  "
            told += f"[{sooner['min']:.2f}, {sooner['max']:.2f}], reached by {row['reached']} of {row['seeds']}"
        print(f"{start} {row['mean_accuracy']:8.2f}% {told}")


def draw(rows: Sequence[Row], runs: Runs, path: Path) -> None:
    """Accuracy over seconds, mean of the seeds, a panel per kind of system with its one-thread BP in each."""
    kinds = {
        "plain PyTorch and DDP": (RESNET, "pytorch"),
        "torch's 1F1B": (RESNET, "torch pipelining"),
        "Unlatch": (RESNET, "unlatch"),
        "Unlatch, RevNet-20": (REVNET, "unlatch"),
    }
    figure, axes = plt.subplots(1, len(kinds), figsize=(17, 4.6), layout="constrained", sharex=True, sharey=True)
    for axis, (title, (network, owner)) in zip(axes, kinds.items(), strict=True):
        mine = [row for row in rows if row["network"] == network and "reason" not in row]
        base = label(Plain(), network)
        shown = [row["system"] for row in mine if row["system"].startswith(owner) and row["system"] != base]
        for number, name in enumerate([base, *shown]):
            of_seeds = [row["points"] for row in runs.rows if row["system"] == name]
            mean = [
                [statistics.fmean(values) for values in zip(*at, strict=True)] for at in zip(*of_seeds, strict=True)
            ]
            look = {"color": "#777777", "linestyle": "--"} if name == base else {"color": f"C{number - 1}"}
            axis.plot([0, *(x for x, _ in mean)], [CHANCE, *(y for _, y in mean)], marker="o", label=name, **look)
        for target in {row["target"] for row in mine}:
            axis.axhline(target, color="#cc3311", linewidth=0.8)
        axis.set(title=title, xlabel="seconds of training")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7, loc="lower right")
    axes[0].set_ylabel("test accuracy, percent (red: to reach)")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="where cifar-10-batches-bin is")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--test", type=int, default=5_000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--full-stem", action="store_true", help="a stem of stride 1")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="systems whose name has one of these, and their BP")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files; another one for a trial")
    args = parser.parse_args()
    recipe = Recipe(
        args.data_dir,
        args.images,
        args.test,
        args.epochs,
        args.batch,
        args.lr,
        1 if args.full_stem else 2,
        args.precision,
    )
    field = [
        (system, network)
        for system, network in FIELD
        if not args.only or system == Plain() or any(word in label(system, network) for word in args.only)
    ]
    name = "wall_clock" + ("_full_stem" if args.full_stem else "")
    runs = Runs(args.out / f"{name}.jsonl", recipe)
    reasons = measure(recipe, field, args.seeds, runs)
    rows, uneven = summary(field, args.seeds, runs, reasons), noise(runs)
    show(rows)
    print(f"reference step: slowest over fastest {uneven['slowest_over_fastest']:.2f} (1.00: an even machine)")
    result = {"settings": recipe.settings, "rows": rows, "noise": uneven}
    path = write(name, result, args.out)
    draw(rows, runs, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
