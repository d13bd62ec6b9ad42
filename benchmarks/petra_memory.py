"""Claim: the peak of activation memory of a petra run on 2 ranks does not depend on the number of reversible blocks per
stage (8 against 32, within 5 %), while that of 1f1b grows in proportion.

    python benchmarks/petra_memory.py

A RevNet of fixed width in four stages, two per rank: stem, n couplings, n couplings, head. Both methods train on
batches of 64 images of 16x16 in four micro-batches. Activation bytes are what the runtime measured at each stage at the
worst moment, from live tensors: queues of inputs and graphs; per rank, the sum over its stages, in which the stem is a
constant part. Messages that wait for a stage are listed apart, since how many wait depends on timing (the schedule
bounds them). Beside it the growth of the process's resident memory from before the first step to its peak, which
contains everything else as well (messages, gradients, buffers of libraries). The allocator is told to return what is
freed (MALLOC_MMAP_THRESHOLD_), or fragments would nearly double that number.
"""

from __future__ import annotations

import argparse
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import psutil
import torch
from common import write
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.methods import PETRA, Method, OneFOneB
from unlatch.models.revnet import revnet_fixed

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLOCKS = (8, 16, 24, 32)
BATCH, PARTS, SIDE, WIDTH, STEPS = 64, 4, 16, 16, 5
METHODS: dict[str, Method] = {"petra": PETRA(microbatches=PARTS), "1f1b": OneFOneB(microbatches=PARTS)}
IMAGE = Path(__file__).parents[1] / "docs" / "methods" / "petra_memory.png"
COLOURS = {"petra": "#0072B2", "1f1b": "#D55E00"}


def job(method: Method, blocks: int) -> dict[str, Any]:
    """Train a few steps on this rank and tell its peaks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = revnet_fixed(2 * blocks, width=WIDTH, zero_init=True)
    split = ["layer1.0", f"layer1.{blocks}", "head"]
    with unlatch.parallelize(
        model,
        method,
        stages=4,
        loss_fn=cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.001),
        split=split,
    ) as run:
        before = psutil.Process().memory_info().rss
        for _ in range(STEPS):
            run.step(torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(10, (BATCH,)))
        run.flush()
        found = run.statistics()
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    ranks = sorted({s.rank for s in found})
    return {
        "stages": [{"rank": s.rank, "peak": s.peak_bytes, "messages": s.message_bytes} for s in found],
        "activations": [sum(s.peak_bytes for s in found if s.rank == r) for r in ranks],
        "messages": [sum(s.message_bytes for s in found if s.rank == r) for r in ranks],
        "resident": resident,
    }


def measure(name: str, blocks: int) -> dict[str, Any]:
    """One run in fresh processes, since resident memory never shrinks."""
    with unlatch.Ranks(2) as ranks:
        found = ranks.run(job, METHODS[name], blocks)
    return {
        "method": name,
        "blocks": blocks,
        "activations": max(found[0]["activations"]),
        "messages": max(found[0]["messages"]),
        "resident": max(f["resident"] for f in found),
        "stages": found[0]["stages"],
    }


def draw(rows: list[dict[str, Any]]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axes, what, title in (
        (left, "activations", "peak of activations"),
        (right, "resident", "growth of resident memory, everything included"),
    ):
        for name in METHODS:
            line = [(r["blocks"], r[what] / 1e6) for r in rows if r["method"] == name]
            axes.plot(*zip(*line, strict=True), marker="o", color=COLOURS[name], label=name)
            axes.annotate(name, line[-1], xytext=(6, 0), textcoords="offset points", va="center", color=COLOURS[name])
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks(BLOCKS)
        axes.set_xlabel("reversible blocks per stage")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_xlim(right=BLOCKS[-1] + 4)
    left.set_ylim(0, 1.05 * max(max(r["activations"], r["resident"]) for r in rows) / 1e6)
    left.set_ylabel("MB at the fuller rank")
    figure.savefig(IMAGE, dpi=130)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rows = [measure(name, blocks) for name in METHODS for blocks in BLOCKS]
    columns = ("activations", "messages", "resident")
    print(f"{'method':8} {'blocks':>6}" + "".join(f"{name + ' (MB)':>18}" for name in columns))
    for row in rows:
        print(f"{row['method']:8} {row['blocks']:6}" + "".join(f"{row[name] / 1e6:18.1f}" for name in columns))
    peaks = {(row["method"], row["blocks"]): row["activations"] for row in rows}
    growth = {name: peaks[name, BLOCKS[-1]] / peaks[name, BLOCKS[0]] for name in METHODS}
    for name, ratio in growth.items():
        print(f"{name}: {ratio:.3f} times the bytes for {BLOCKS[-1] / BLOCKS[0]:g} times the blocks")
    draw(rows)
    result = {"rows": rows, "growth": growth}
    print(write("petra_memory", result))


if __name__ == "__main__":
    main()
