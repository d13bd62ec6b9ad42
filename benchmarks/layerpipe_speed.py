"""Does it pay to place the two gradients of a layer apart? Claims, on 2 ranks with one thread each, fp32:

- `chain`, linear layers whose costs are 1 : 2 : 4 : 3, input and weight gradients as much as the forward: layerpipe
  trains at least 1.15 times as fast as pipedream (theory: 20 / 16 = 1.25), with the same loss within noise.
- `conv5`, four convolutions without batch norm whose costs are about 1 : 5 : 21 : 11, and a head: at least 1.1 times.
  No cut between layers is balanced there, which is what the split is for.
- `vgg11`, the eight convolutions of VGG-11 at half of its width, strides for poolings, no batch norm: about 1, between
  0.95 and 1.1 times. Whole layers can be balanced, so the split has little to win.

    python benchmarks/layerpipe_speed.py [--repeats 7] [--steps 8] [--networks chain conv5 vgg11]

PipeDream's best cut of the chain puts three layers (1 + 1 + 6 + 12 = 20) on one rank and one (9) on the other.
LayerPipe moves the weight gradient of the third layer to the second rank, which is sent its input and returns the
gradient: 16 and 13. Of convolutional networks each method makes its plan as it does for a user, from a profile of its
own; the theory is that of costs that both ranks measured at the same time, forwards that are done twice charged.

Rounds are interleaved: each builds a run of either method, fills its pipeline, and counts the time in which both ranks
are at work. The speed-up is the median of the ratios of each round, which a drift of the machine's speed does not
touch. CPU seconds of each process, transport included, are reported as well: the ratio of the largest is what the
methods would reach without ever waiting. Every network has a result file of its own, written when it is done. About 5
minutes on an idle machine for all three.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import WARM, completions, interleave, options, spread, steady_seconds, write
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import unlatch
from unlatch.methods import LayerPipe, PipeDream
from unlatch.methods.layerpipe.task_planning import place_tasks
from unlatch.nn.chain import chain
from unlatch.plan import Plan, profile
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layer_groups import group_blocks, grouped_profile, linear_of
from unlatch.plan.layerpipe import pipedream_interval

TIMES = (1, 2, 4, 3)
#: Products of neighbours are in proportion 1 : 2 : 4 : 3.
WIDTHS = (768, 768, 1536, 1536, 1152)
COSTS = tuple(LayerCost(str(n), t, t, t) for n, t in enumerate(TIMES))
NAMES = ("pipedream", "layerpipe")
#: Width and stride of each convolution.
CONV5 = ((32, 1), (64, 2), (128, 1), (128, 2))
VGG11 = ((32, 1), (64, 2), (128, 2), (128, 1), (256, 2), (256, 1), (256, 2), (256, 1))
SIDE, CLASSES = 32, 10


def model(seed: int = 0) -> nn.Sequential:
    """The chain of linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(WIDTHS)])


def convolutions(layers: Sequence[tuple[int, int]], seed: int = 0) -> nn.Sequential:
    """Convolutions of 3x3 with ReLU, and a linear layer on all that is left of the picture."""
    torch.manual_seed(seed)
    units: list[nn.Module] = []
    inputs, side = 3, SIDE
    for width, stride in layers:
        units.append(nn.Sequential(nn.Conv2d(inputs, width, 3, stride, padding=1), nn.ReLU()))
        nn.init.kaiming_normal_(units[-1][0].weight)
        inputs, side = width, side // stride
    head = nn.Sequential(nn.Flatten(), nn.Linear(inputs * side * side, CLASSES))
    return nn.Sequential(*units, head).to(memory_format=torch.channels_last)


def vectors(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(size, WIDTHS[0], generator=generator)


def pictures(size: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(size, 3, SIDE, SIDE, generator=generator)
    return drawn.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Network:
    """A network with its data, the batch that is timed, and the learning rate.

    **Arguments:** `costs`, `split`: of layers, and where pipedream's best cut for them is; or each method finds out.
    """

    model: Callable[[int], nn.Sequential]
    inputs: Callable[[int, torch.Generator], Tensor]
    batch: int
    lr: float
    costs: tuple[LayerCost, ...] | None = None
    split: tuple[str, ...] | None = None

    def batches(self, size: int, count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Regression on a fixed network of the same shape."""
        teacher, generator = self.model(1000), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            inputs = [self.inputs(size, generator) for _ in range(count)]
            return [(x, 3.0 * teacher(x)) for x in inputs]

    def start(self, name: str, seed: int = 0, plan: Plan | None = None) -> unlatch.Run:
        """A run on all ranks, by this plan or by the best one that the method has."""
        where: dict[str, Any] = {"plan": plan, "sample": self.batches(self.batch, 1)[0]}
        if self.costs is not None:
            where = {} if name == "layerpipe" else {"split": list(self.split or ())}
        method = PipeDream(microbatches=1)
        if name == "layerpipe":
            method = LayerPipe(mode="divisible", costs=self.costs, microbatches=1)
        # One micro-batch per update is worth a warning elsewhere; here every message is to be as large as it can be.
        logging.getLogger("unlatch").setLevel(logging.ERROR)
        sgd = partial(torch.optim.SGD, lr=self.lr, momentum=0.5)
        return unlatch.parallelize(self.model(seed), method, stages=2, loss_fn=mse_loss, optimizer=sgd, **where)


NETWORKS = {
    # The loss is a mean over more than a thousand outputs, so its gradient is small.
    "chain": Network(model, vectors, 1536, 20.0, COSTS, ("3",)),
    "conv5": Network(partial(convolutions, CONV5), pictures, 64, 0.01),
    "vgg11": Network(partial(convolutions, VGG11), pictures, 64, 0.01),
}


class Measured(NamedTuple):
    """Of one rank: when its steps were done, CPU seconds of a step, and what the run says about itself."""

    ends: list[float]
    cpu: float
    details: dict[str, Any]


def planned(network: str, name: str) -> Plan:
    """The plan by which a method trains in all rounds."""
    torch.set_num_threads(1)
    with NETWORKS[network].start(name) as run:
        return run.plan


def measure(network: str, name: str, plan: Plan, steps: int) -> Measured:
    """One round on this rank: build a run, fill its pipeline, and take the times of its steps."""
    torch.set_num_threads(1)
    case = NETWORKS[network]
    x, y = case.batches(case.batch, 1)[0]
    with case.start(name, plan=plan) as run:
        for _ in range(1 + run.schedule.depth):
            run.step(x, y)
        dist.barrier()
        busy = time.process_time()
        ends = completions(lambda: run.step(x, y), steps)
        cpu = (time.process_time() - busy) / (WARM + steps)
        run.flush()
        found = run.statistics()
    stages = [{"stage": s.stage, "rank": s.rank, "bubble": s.bubble, "staleness": s.staleness} for s in found]
    return Measured(ends, cpu, {"stages": stages, "bytes_sent": {s.rank: s.bytes_sent for s in found}})


def final_loss(network: str, name: str, seed: int, plan: Plan, steps: int) -> float:
    """Loss on batches that were not trained on, after training on fresh ones."""
    torch.set_num_threads(1)
    case = NETWORKS[network]
    with case.start(name, seed, plan) as run:
        unlatch.Trainer(run).fit(case.batches(128, steps, seed + 1))
        return run.evaluate(case.batches(256, 2, seed=77))["loss"]


def layer_costs(network: str) -> list[LayerCost]:
    """Seconds of forward, input gradient and weight gradient of each layer, measured by this rank."""
    torch.set_num_threads(1)
    case = NETWORKS[network]
    blocks = chain(case.model(0))
    dist.barrier()
    return grouped_profile(profile(blocks, case.batches(case.batch, 1)[0][0]), group_blocks(blocks))


def in_theory(network: str, costs: Sequence[LayerCost]) -> float:
    """How much faster the best placement of tasks is than the best cut, messages free."""
    blocks = chain(NETWORKS[network].model(0))
    linear = [linear_of(blocks, span, "fp32") is not None for span in group_blocks(blocks)]
    _, loads, _ = place_tasks(costs, 2, "divisible", linear)
    return float(pipedream_interval(costs, 2) / max(loads))


def answer(ranks: unlatch.Ranks, network: str, repeats: int, steps: int, seeds: int, loss_steps: int) -> dict[str, Any]:
    """All that is measured of one network."""
    costs = ranks.run(layer_costs, network)[0]
    theory = in_theory(network, NETWORKS[network].costs or costs)
    plans = {name: ranks.run(planned, network, name)[0] for name in NAMES}
    rounds: dict[str, list[list[Measured]]] = {name: [] for name in NAMES}

    def one(name: str) -> float:
        rounds[name].append(ranks.run(measure, network, name, plans[name], steps))
        seconds = steady_seconds([rank.ends for rank in rounds[name][-1]])
        print(f"{network:6} {name:10} {1e3 * seconds:8.1f} ms per batch", flush=True)
        return seconds

    times = interleave({name: partial(one, name) for name in NAMES}, repeats)
    losses = {
        name: [ranks.run(final_loss, network, name, seed, plans[name], loss_steps)[0] for seed in range(seeds)]
        for name in NAMES
    }
    by_rank = {name: [[rank.cpu for rank in one_round] for one_round in rounds[name]] for name in NAMES}
    cpu = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in by_rank.items()}
    return {
        "network": network,
        "speedup": spread([p / q for p, q in zip(times["pipedream"], times["layerpipe"], strict=True)]),
        "ratio_of_medians": statistics.median(times["pipedream"]) / statistics.median(times["layerpipe"]),
        "theory": theory,
        "cpu_ratio": max(cpu["pipedream"]) / max(cpu["layerpipe"]),
        "seconds_per_batch": {name: spread(values) for name, values in times.items()},
        "final_loss": losses,
        "measured_costs": [[cost.F, cost.D, cost.G] for cost in costs],
        "plans": {name: str(plan) for name, plan in plans.items()},
        "details": {name: rounds[name][-1][0].details for name in NAMES},
        "cpu_seconds_per_batch": cpu,
    }


def main() -> None:
    parser = options(__doc__, repeats=7, steps=8)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loss-steps", type=int, default=150)
    args = parser.parse_args()
    with unlatch.Ranks(2) as ranks:
        for network in args.networks:
            found = answer(ranks, network, args.repeats, args.steps, args.seeds, args.loss_steps)
            ratio = found["speedup"]
            print(
                f"{network}: layerpipe {ratio['median']:.3f} times pipedream [{ratio['min']:.3f}, {ratio['max']:.3f}], "
                f"theory {found['theory']:.3f}, busiest process {found['cpu_ratio']:.3f}, losses {found['final_loss']}"
            )
            name = "layerpipe_speed" + ("" if network == "chain" else f"_{network}")
            print(write(name, found, args.out), flush=True)


if __name__ == "__main__":
    main()
