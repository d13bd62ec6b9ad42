"""Claim: on 2 ranks with one thread each, a chain whose layers cost 1 : 2 : 4 : 3, input and weight gradients as much
as the forward, trains under layerpipe at least 1.15 times as fast as under pipedream (theory: 20 / 16 = 1.25), with the
same loss within noise.

    python benchmarks/layerpipe_speed.py [--repeats 11] [--steps 8] [--batch 1536]

PipeDream's best cut puts three layers (1 + 1 + 6 + 12 = 20) on one rank and one (9) on the other. LayerPipe moves the
weight gradient of the third layer to the second rank, which is sent its input and returns the gradient: 16 and 13.
Rounds are interleaved; pipelines stay full, and only the time in which both ranks are at work counts. Two speed-ups are
reported: the ratio of the medians of all rounds, and the median of the ratios of each round, which a drift of the
machine's speed does not touch. CPU seconds of each process, transport included, are reported as well: the ratio of the
largest is what the methods would reach without ever waiting.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from common import WARM, completions, interleave, options, spread, steady_seconds, write
from torch import nn
from torch.nn.functional import mse_loss

import unlatch
from unlatch.methods import LayerPipe, PipeDream
from unlatch.nn.chain import chain
from unlatch.plan import profile
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import pipedream_interval, plan_layerpipe

TIMES = (1, 2, 4, 3)
#: Products of neighbours are in proportion 1 : 2 : 4 : 3.
WIDTHS = (768, 768, 1536, 1536, 1152)
COSTS = tuple(LayerCost(str(n), t, t, t) for n, t in enumerate(TIMES))
NAMES = ("pipedream", "layerpipe")
# The loss is a mean over more than a thousand outputs, so its gradient is small.
SGD = partial(torch.optim.SGD, lr=20.0, momentum=0.5)
CANDIDATES: dict[str, Candidate] = {}


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(WIDTHS)])


def batches(size: int, count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Regression on a fixed network of the same shape."""
    teacher, generator = model(seed=1000), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        inputs = [torch.randn(size, WIDTHS[0], generator=generator) for _ in range(count)]
        return [(x, 3.0 * teacher(x)) for x in inputs]


def start(name: str, seed: int = 0) -> unlatch.Run:
    """A run on all ranks, with the best cut that each method has for these costs."""
    if name == "pipedream":
        where: dict[str, Any] = {"method": PipeDream(microbatches=1), "split": ["3"]}
    else:
        where = {"method": LayerPipe(mode="divisible", costs=COSTS, microbatches=1)}
    return unlatch.parallelize(model(seed), stages=2, loss_fn=mse_loss, optimizer=SGD, **where)


class Candidate:
    """One run on this rank, with data."""

    def __init__(self, name: str, size: int) -> None:
        self.run = start(name)
        self.data = batches(size, 4)
        self.fed = 0

    def step(self) -> None:
        self.run.step(*self.data[self.fed % len(self.data)])
        self.fed += 1


def prepare(name: str, size: int) -> str:
    """Build a candidate and fill its pipeline."""
    torch.set_num_threads(1)
    CANDIDATES[name] = Candidate(name, size)
    for _ in range(6):
        CANDIDATES[name].step()
    return str(CANDIDATES[name].run.plan)


def measure(name: str, steps: int) -> tuple[list[float], float]:
    """When each step was done on this rank, and CPU seconds of this process per step."""
    dist.barrier()
    busy = time.process_time()
    ends = completions(CANDIDATES[name].step, steps)
    return ends, (time.process_time() - busy) / (WARM + steps)


def finish(name: str) -> dict[str, Any]:
    """Empty the pipeline and tell what the run measured about itself."""
    run = CANDIDATES[name].run
    run.flush()
    found = run.statistics()
    stages = [{"stage": s.stage, "rank": s.rank, "bubble": s.bubble, "staleness": s.staleness} for s in found]
    return {"stages": stages, "bytes_sent": {s.rank: s.bytes_sent for s in found}, "batches": CANDIDATES[name].fed}


def final_loss(name: str, seed: int, steps: int) -> float:
    """Loss on batches that were not trained on, after training on fresh ones."""
    torch.set_num_threads(1)
    data = batches(128, steps, seed + 1)
    with start(name, seed) as run:
        unlatch.Trainer(run).fit(data)
        return run.evaluate(batches(256, 2, seed=77))["loss"]


def proportions(size: int) -> list[list[float]]:
    """Measured seconds of forward, input gradient and weight gradient, per layer, in units of the mean of the first."""
    torch.set_num_threads(1)
    found = profile(chain(model()), batches(size, 1)[0][0])
    unit = sum(c.forward + c.input_grad + c.weight_grad for c in found) / (3 * sum(TIMES) - TIMES[0])
    return [[round(x / unit, 2) for x in (c.forward, c.input_grad, c.weight_grad)] for c in found]


def main() -> None:
    parser = options(__doc__, repeats=11, steps=8)
    parser.add_argument("--batch", type=int, default=1536)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loss-steps", type=int, default=150)
    args = parser.parse_args()
    theory = float(pipedream_interval(COSTS, 2) / plan_layerpipe(COSTS, 2).initiation_interval)
    with unlatch.Ranks(2) as ranks:
        shares = ranks.run(proportions, args.batch)[0]
        print(f"measured costs F, D, G per layer, wanted {TIMES}: {shares}", flush=True)
        plans = {name: ranks.run(prepare, name, args.batch)[0] for name in NAMES}
        busy: dict[str, list[list[float]]] = {name: [] for name in NAMES}

        def one(name: str) -> float:
            ends, cpu = zip(*ranks.run(measure, name, args.steps), strict=True)
            busy[name].append(list(cpu))
            seconds = steady_seconds(ends)
            print(f"{name:10} {1e3 * seconds:8.1f} ms per batch", flush=True)
            return seconds

        times = interleave({name: partial(one, name) for name in NAMES}, args.repeats)
        details = {name: ranks.run(finish, name)[0] for name in NAMES}
        seeds = range(args.seeds)
        losses = {n: [ranks.run(final_loss, n, seed, args.loss_steps)[0] for seed in seeds] for n in NAMES}
    medians = {name: statistics.median(times[name]) for name in NAMES}
    overall = medians["pipedream"] / medians["layerpipe"]
    found = spread([p / q for p, q in zip(times["pipedream"], times["layerpipe"], strict=True)])
    cpu = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in busy.items()}
    largest = max(cpu["pipedream"]) / max(cpu["layerpipe"])
    for name in NAMES:
        print(f"{name:10} median {1e3 * medians[name]:8.1f} ms per batch, final losses {losses[name]}")
    print(f"layerpipe / pipedream: ratio of medians {overall:.3f}, theory {theory:.3f}")
    print(f"ratios of rounds: median {found['median']:.3f} [{found['min']:.3f}, {found['max']:.3f}]")
    print(f"CPU seconds per batch and rank: {cpu}, ratio of the largest {largest:.3f}")
    settings = f"--repeats {args.repeats} --steps {args.steps} --batch {args.batch}"
    result = {
        "speedup": found,
        "ratio_of_medians": overall,
        "theory": theory,
        "seconds_per_batch": {n: spread(t) for n, t in times.items()},
        "final_loss": losses,
        "measured_costs": shares,
        "plans": plans,
        "details": details,
        "cpu_seconds_per_batch": cpu,
        "command": f"python benchmarks/layerpipe_speed.py {settings}",
    }
    print(write("layerpipe_speed", result, args.out))


if __name__ == "__main__":
    main()
