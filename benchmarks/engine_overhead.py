"""Claim: with next to nothing to compute, a micro-batch of 1f1b costs each of 2 or 4 ranks no more CPU time than
torch's own 1F1B, and inner ranks of 4 at most 0.6 of it; bp, pipedream and dtrp, which update after every micro-batch
where torch does so after eight, cost at most twice of it. Inline they cost at most 6 times a hand-written loop. auxnet
and layerpipe, which do more, cost at most 14 and 7 times of these.

The target was 0.6 of torch's 1F1B on all ranks. Only inner ranks reach it: what is left at the edge is the stage
itself, which inline costs as much, not the transport.

    python benchmarks/engine_overhead.py [--repeats 7] [--steps 320] [--only bp pipedream]

Stages are one 8x8 linear layer, micro-batches 16 rows, so that what is measured is the price of the engine, of
autograd, of the optimizer and of transport. It is CPU time of the whole process, all threads, not time on the clock:
ranks may share cores, and a rank that waits without spinning pays nothing. Inline one process holds all stages, as the
hand-written loop holds all layers; on ranks each holds one. On 4 ranks those at the edge, with one neighbour, and the
inner ones, with two, are reported by themselves. `--steps` counts micro-batches; "x8" is eight of them per update, the
others update after each.

auxnet computes more than the others: every border has a network of its own, trained as well. layerpipe places its tasks
by the number of parameters, not by a measurement, so that its plan is the same in every run.

Rounds are interleaved, and every measurement builds its run, warms it up and closes it, so that no idle threads of
another run are counted.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from common import interleave, options, spread, write
from torch import nn
from torch.nn.functional import mse_loss

import unlatch

WIDTH, ROWS = 8, 16
#: Micro-batches before those that count; a multiple of eight, and more than fill any pipeline here.
WARM = 64
HAND, TORCH = "hand-written loop", "torch 1f1b x8"
METHODS = ("bp", "1f1b x8", "pipedream", "dtrp", "auxnet", "layerpipe")
#: Columns of the table: stages and ranks, and the ranks whose mean counts.
COLUMNS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "inline, 2 stages": (2, 1, (0,)),
    "inline, 4 stages": (4, 1, (0,)),
    "2 ranks": (2, 2, (0, 1)),
    "4 ranks, edge": (4, 4, (0, 3)),
    "4 ranks, inner": (4, 4, (1, 2)),
}
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def microbatches(name: str) -> int:
    """Per step of a candidate."""
    return 8 if name.endswith("x8") else 1


def model(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


class HandWritten:
    """Plain PyTorch: all layers in one loop."""

    def __init__(self, stages: int) -> None:
        self.model = model(stages)
        self.optimizer = SGD(self.model.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        mse_loss(self.model(x), y).backward()
        self.optimizer.step()

    def close(self) -> None:
        pass


class TorchPipelining:
    """torch.distributed.pipelining, one layer per rank."""

    def __init__(self, stages: int, parts: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, self.last = dist.get_rank(), stages - 1
        layer = model(stages)[self.rank]
        stage = PipelineStage(layer, self.rank, stages, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, parts, loss_fn=mse_loss)
        self.optimizer = SGD(layer.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(x)
        elif self.rank == self.last:
            self.schedule.step(target=y, losses=[])
        else:
            self.schedule.step()
        self.optimizer.step()

    def close(self) -> None:
        pass


def build(name: str, stages: int, data: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """A candidate on this rank: something with `step` and `close`."""
    if name == HAND:
        return HandWritten(stages)
    if name == TORCH:
        return TorchPipelining(stages, microbatches(name))
    method = unlatch.methods.get(name.split()[0], microbatches=microbatches(name))
    where: dict[str, Any] = {"split": [str(layer) for layer in range(1, stages)], "sample": data}
    if name == "layerpipe":
        # A split would forbid it to place tasks, and a sample would make the plan depend on a measurement.
        where = {}
    inline = dist.get_world_size() == 1
    return unlatch.parallelize(
        model(stages), method, stages=stages, loss_fn=mse_loss, optimizer=SGD, distributed=not inline, **where
    )


def measure(name: str, stages: int, steps: int) -> float:
    """CPU seconds of this process per micro-batch, with a full pipeline."""
    torch.set_num_threads(1)
    # AuxNets as large as what they stand for are worth a warning elsewhere.
    logging.getLogger("unlatch").setLevel(logging.ERROR)
    parts = microbatches(name)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(parts * ROWS, WIDTH, generator=generator) for _ in range(2))
    candidate = build(name, stages, (x, y))
    dist.barrier()
    for _ in range(WARM // parts):
        candidate.step(x, y)
    count = max(1, steps // parts)
    start = time.process_time()
    for _ in range(count):
        candidate.step(x, y)
    seconds = (time.process_time() - start) / (count * parts)
    candidate.close()
    return seconds


def cell(entry: dict[str, dict[str, float]] | None) -> str:
    """Of the table: median, range and ratio, or nothing measured."""
    if entry is None:
        return "-"
    found = entry["microseconds"]
    return f"{found['median']:.0f} [{found['min']:.0f}, {found['max']:.0f}] {entry['ratio']['median']:4.1f}"


def main() -> None:
    parser = options(__doc__, repeats=7, steps=320)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="candidates, by their names in the table")
    args = parser.parse_args()
    names = [n for n in (HAND, *METHODS, TORCH) if not args.only or n in args.only or n in (HAND, TORCH)]
    places = dict.fromkeys((stages, ranks) for stages, ranks, _ in COLUMNS.values())
    # A hand-written loop has no ranks, and torch's pipeline is nothing without.
    absent = {HAND: lambda ranks: ranks > 1, TORCH: lambda ranks: ranks == 1}
    wanted = [(n, s, r) for s, r in places for n in names if n not in absent or not absent[n](r)]
    with ExitStack() as stack:
        teams = {ranks: stack.enter_context(unlatch.Ranks(ranks)) for ranks in sorted({r for _, r in places})}

        def seconds(name: str, stages: int, ranks: int, steps: int = args.steps) -> list[float]:
            return teams[ranks].run(measure, name, stages, steps)

        for one in wanted:
            seconds(*one, steps=WARM)
        times = interleave({str(one): partial(seconds, *one) for one in wanted}, args.repeats)
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for column, (stages, ranks, members) in COLUMNS.items():
        rounds = {
            name: [1e6 * fmean(each[rank] for rank in members) for each in times[str((name, stages, ranks))]]
            for name in names
            if (name, stages, ranks) in wanted
        }
        base = rounds[HAND if ranks == 1 else TORCH]
        for name, values in rounds.items():
            ratios = [value / unit for value, unit in zip(values, base, strict=True)]
            found[name][column] = {"microseconds": spread(values), "ratio": spread(ratios)}
    print(
        "CPU microseconds per micro-batch and rank: median [min, max], and ratio to hand-written inline, torch on ranks"
    )
    print(f"{'':17}" + "".join(f"{column:>25}" for column in COLUMNS))
    for name, row in found.items():
        print(f"{name:17}" + "".join(f"{cell(row.get(column)):>25}" for column in COLUMNS))
    print(write("engine_overhead", {"cpu_per_microbatch": found}, args.out))


if __name__ == "__main__":
    main()
