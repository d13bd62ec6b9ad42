"""What one process, bp, inline costs over a hand-written PyTorch loop (ResNet-20, batch 128, one thread).

The target was 3 %. The committed result, `results/inline_overhead.json`, has a median of 7 %, with 1 stage and with 4.

python benchmarks/inline_overhead.py [--repeats 9] [--steps 6]
"""

from __future__ import annotations

import argparse
import time

import torch
from common import interleave, spread, write
from pipeline_speed import SGD, SUBJECT, batch, cross_entropy, model

import unlatch
from unlatch.throughput.systems import Loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = batch()
    plain = Loop(SUBJECT, model(), (x, y))
    runs = {k: unlatch.parallelize(model(), "bp", stages=k, loss_fn=cross_entropy, optimizer=SGD) for k in (1, 4)}

    def timed(work) -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) / args.steps

    candidates = {
        "hand-written loop": lambda: timed(lambda: [plain.step() for _ in range(args.steps)]),
        "unlatch, 1 stage": lambda: timed(lambda: [runs[1].step(x, y) for _ in range(args.steps)]),
        "unlatch, 4 stages": lambda: timed(lambda: [runs[4].step(x, y) for _ in range(args.steps)]),
    }
    for candidate in candidates.values():
        candidate()
    times = interleave(candidates, args.repeats)
    base = times["hand-written loop"]
    ratios = {n: spread([t / b for b, t in zip(base, values, strict=True)]) for n, values in times.items()}
    for name, r in ratios.items():
        milliseconds = 1e3 * spread(times[name])["median"]
        print(f"{name:20} {milliseconds:8.1f} ms  {r['median']:.3f} [{r['min']:.3f}, {r['max']:.3f}]")
    print(write("inline_overhead", {"ratio": ratios}))


if __name__ == "__main__":
    main()
