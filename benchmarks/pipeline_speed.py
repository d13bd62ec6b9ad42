"""Claim: on 2 ranks with one thread each, ResNet-20 (batch 128, fp32, channels_last) trains under pipedream and fdg at
least 1.75 times, and under dtr at least 1.5 times, as fast as one-thread BP; and the fastest of them is at least 1.1
times as fast as torch.distributed.pipelining's 1F1B with 2, 4 or 8 micro-batches.

    python benchmarks/pipeline_speed.py [--repeats 7] [--steps 12]

The claim is about the steady state: pipelines of asynchronous methods stay full from round to round, and only the time
in which all ranks are at work counts. Synchronous methods empty their pipeline in every step, within their time.

Limits: dtr runs one stage's forward twice, which leaves 1.75 with the best cut; and no method can do better than "two
processes", two independent runs of one-thread BP at once, of which the machine itself makes 2.0 at best. Rounds are
interleaved: every round measures every candidate for a few steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import completions, interleave, options, spread, steady_seconds, write
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.models import build

BATCH = 128
METHODS = ("bp", "1f1b", "pipedream", "fdg", "dtr", "dtrp")
TORCH = (2, 4, 8)
#: Independent runs of plain BP at the same time.
PROCESSES = {"one process": 1, "two processes": 2}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (BATCH,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return build("resnet20").to(memory_format=torch.channels_last)


SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)


class OneProcess:
    """Plain PyTorch, one thread."""

    def __init__(self) -> None:
        self.model, self.data = model(), batch()
        self.optimizer = SGD(self.model.parameters())

    def step(self) -> None:
        x, y = self.data
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


class Unlatch:
    """One of our methods on all ranks."""

    def __init__(self, name: str) -> None:
        self.data = batch()
        self.run = unlatch.parallelize(model(), name, stages=2, loss_fn=cross_entropy, optimizer=SGD, sample=self.data)

    def step(self) -> None:
        self.run.step(*self.data)


class Contiguous(nn.Module):
    """Makes what crosses a border contiguous in both directions: gloo refuses anything else."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x = x.clone()
            x.register_hook(lambda g: g.contiguous())
        return self.part(x).contiguous()


class TorchPipelining:
    """torch.distributed.pipelining with the cut that our plan chose for a fused backward."""

    def __init__(self, microbatches: int, starts: tuple[int, ...]) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        rank = dist.get_rank()
        blocks = list(model().blocks())
        bounds = [*starts, len(blocks)]
        part = Contiguous(nn.Sequential(*blocks[bounds[rank] : bounds[rank + 1]]))
        self.data, self.rank = batch(), rank
        stage = PipelineStage(part, rank, 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=cross_entropy)
        self.optimizer = SGD(part.parameters())

    def step(self) -> None:
        x, y = self.data
        self.optimizer.zero_grad()
        if self.rank == 0:
            self.schedule.step(x.contiguous())
        else:
            self.schedule.step(target=y, losses=[])
        self.optimizer.step()


CANDIDATES: dict[str, Any] = {}


def prepare(name: str) -> Any:
    """Build a candidate on this rank, once."""
    torch.set_num_threads(1)
    if name in PROCESSES:
        CANDIDATES[name] = OneProcess() if dist.get_rank() < PROCESSES[name] else None
        return None
    if name.startswith("torch"):
        starts = CANDIDATES["pipedream"].run.plan.starts
        CANDIDATES[name] = TorchPipelining(int(name.split("x")[1]), starts)
        return starts
    CANDIDATES[name] = Unlatch(name)
    return CANDIDATES[name].run.plan.starts


def measure(name: str, steps: int) -> list[float]:
    """When each step was done on this rank; nothing if it takes no part."""
    candidate = CANDIDATES[name]
    dist.barrier()
    return completions(candidate.step, steps) if candidate is not None else []


def main() -> None:
    parser = options(__doc__, repeats=7, steps=12)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    names = [*PROCESSES, *METHODS, *[f"torch 1f1b x{m}" for m in TORCH]]
    # The others need one process to be compared with, and torch's pipelines take the cut of pipedream.
    needed = {"one process", *(["pipedream"] if any(n.startswith("torch") for n in args.only or ()) else [])}
    names = [n for n in names if not args.only or n in args.only or n in needed]
    with unlatch.Ranks(2) as ranks:
        starts = {name: ranks.run(prepare, name)[0] for name in names}

        def seconds(name: str) -> float:
            return steady_seconds(ranks.run(measure, name, args.steps)) / PROCESSES.get(name, 1)

        for name in names:
            ranks.run(measure, name, 1)
        times = interleave({name: partial(seconds, name) for name in names}, args.repeats)
    base = times["one process"]
    ratios = {n: [b / t for b, t in zip(base, times[n], strict=True)] for n in names}
    print(f"{'candidate':18} {'ms/batch':>9} {'ratio to one-process BP (median, range)':>42}  cut")
    for name in names:
        r, milliseconds = spread(ratios[name]), 1e3 * spread(times[name])["median"]
        span = f"[{r['min']:.3f}, {r['max']:.3f}]"
        print(f"{name:18} {milliseconds:9.1f} {r['median']:20.3f}  {span}        {starts[name] or ''}")
    result = {
        "seconds_per_batch": {n: spread(t) for n, t in times.items()},
        "ratio": {n: spread(r) for n, r in ratios.items()},
        "starts": {n: list(s) if s else None for n, s in starts.items()},
        "command": f"python benchmarks/pipeline_speed.py --repeats {args.repeats} --steps {args.steps}",
    }
    print(write("pipeline_speed", result, args.out))


if __name__ == "__main__":
    main()
