"""Claim: for a profiled model on 2 ranks, the simulator predicts the time per batch of 1f1b, pipedream, dtr, petra and
layerpipe within 10 % of what is measured (median of several rounds).

    python benchmarks/simulated_vs_measured.py [--repeats 7] [--steps 8]

Both ranks measure the blocks at the same time, at the size of a micro-batch, because they will also train at the same
time; a layer's costs are those of the rank that holds it. The update of each stage and the link between the ranks are
measured as well. Nothing is fitted to the runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import interleave, spread, write
from layerpipe_speed import COSTS
from layerpipe_speed import model as chain_model
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.api.method_run import simulate_method
from unlatch.methods import LayerPipe, Method, get
from unlatch.models import build
from unlatch.nn.chain import chain
from unlatch.nn.tree import split_batch
from unlatch.plan import profile
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.plan.layerpipe_run import simulate_layerpipe
from unlatch.schedule.channel import Channel
from unlatch.schedule.simulator_stages import Machine

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)


def images(size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (size,), generator=generator)


def vectors(size: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 768, generator=generator), torch.randint(1152, (size,), generator=generator)


def picture_net(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build(name).to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Case:
    """A method on a model."""

    method: Method
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    def start(self) -> unlatch.Run:
        where: dict[str, Any] = {} if self.costs_given else {"sample": self.data()}
        return unlatch.parallelize(self.model(), self.method, stages=2, loss_fn=cross_entropy, optimizer=SGD, **where)

    @property
    def costs_given(self) -> bool:
        return isinstance(self.method, LayerPipe) and self.method.costs is not None

    @property
    def parts(self) -> int:
        return int(self.method.microbatches)


RESNET, REVNET = partial(picture_net, "resnet20"), partial(picture_net, "revnet14")
CASES = {
    "1f1b": Case(get("1f1b", microbatches=4), RESNET, images),
    "pipedream": Case(get("pipedream", microbatches=1), RESNET, images),
    "dtr": Case(get("dtr", microbatches=1), RESNET, images),
    "petra": Case(get("petra", microbatches=1), REVNET, partial(images, 64)),
    "layerpipe stages": Case(LayerPipe(mode="stages", microbatches=1), RESNET, images),
    "pipedream chain": Case(get("pipedream", microbatches=1), chain_model, vectors),
    "layerpipe chain": Case(LayerPipe(costs=COSTS, microbatches=1), chain_model, vectors),
}
RUNS: dict[str, unlatch.Run] = {}


def block_costs(name: str) -> list[LayerCost]:
    """Costs of the layers for one micro-batch, and updates, on this rank; call it on all ranks at once."""
    torch.set_num_threads(1)
    case = CASES[name]
    x, y = split_batch(case.data(), case.parts)[0]
    blocks = chain(case.model())
    dist.barrier()
    found = profile(blocks, x, partial(_loss, y))
    updates = [_update_seconds(block.module) for block in blocks]
    return [
        LayerCost(
            cost.name,
            cost.forward * case.parts,
            cost.input_grad * case.parts,
            cost.weight_grad * case.parts + update,
            activation_bytes=cost.output_bytes * case.parts,
            weight_bytes=cost.weight_bytes,
        )
        for cost, update in zip(found, updates, strict=True)
    ]


def _loss(target: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, target)


def _update_seconds(module: nn.Module) -> float:
    params = list(module.parameters())
    if not params:
        return 0.0
    optimizer, seconds = SGD(params), []
    for _ in range(5):
        for p in params:
            p.grad = torch.zeros_like(p)
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def link() -> tuple[float, float]:
    """Bytes per second and latency between the two ranks."""
    times: dict[int, float] = {}
    for size in (1 << 14, 1 << 22):
        block, seconds = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(12):
            dist.barrier()
            start = time.perf_counter()
            for turn in range(2):
                (dist.send if dist.get_rank() == turn else dist.recv)(block, 1 - dist.get_rank())
            seconds.append((time.perf_counter() - start) / 2)
        times[size] = statistics.median(seconds)
    small, large = sorted(times)
    bandwidth = (large - small) / max(1e-9, times[large] - times[small])
    return bandwidth, times[small]


def prepare(name: str) -> Any:
    """Start a run and fill its pipeline. **Returns:** the blocks that start stages, if stages are whole."""
    torch.set_num_threads(1)
    RUNS[name] = CASES[name].start()
    feed(name, 4)
    plan = RUNS[name].plan
    return None if CASES[name].costs_given else [plan.blocks[start] for start in plan.starts[1:]]


def feed(name: str, steps: int) -> None:
    x, y = CASES[name].data()
    for _ in range(steps):
        RUNS[name].step(x, y)


def measure(name: str, steps: int) -> float:
    """Seconds per batch with a full pipeline."""
    x, y = CASES[name].data()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        RUNS[name].step(x, y)
    dist.barrier()
    return (time.perf_counter() - start) / steps


def predict(name: str, costs: list[list[LayerCost]], split: list[str] | None, machine: Machine) -> float:
    """Seconds per batch in steady state, from the costs that each rank measured."""
    case = CASES[name]
    if split is None:
        assert isinstance(machine.channel, Channel)
        plan = plan_layerpipe(COSTS, 2, case.method.mode)
        homes = {task.layer: task.processor for task in plan.tasks if task.kind == "F"}
        layers = tuple(costs[homes[n]][n] for n in range(len(homes)))
        return float(simulate_layerpipe(replace(plan, layers=layers), 40, machine, exact=False).interval)
    first_above = next(n for n, layer in enumerate(costs[0]) if layer.name == split[0])
    layers = (*costs[0][:first_above], *costs[1][first_above:])
    return simulate_method(case.method, layers, 2, split=split, machine=machine).time_per_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(CASES))
    args = parser.parse_args()
    with unlatch.Ranks(2) as ranks:
        bandwidth, latency = ranks.run(link)[0]
        machine = Machine(Channel(bandwidth, latency))
        costs = {name: ranks.run(block_costs, name) for name in args.only}
        splits = {name: ranks.run(prepare, name)[0] for name in args.only}
        times = interleave({n: lambda n=n: ranks.run(measure, n, args.steps)[0] for n in args.only}, args.repeats)
    rows = {}
    print(f"link: {bandwidth / 1e9:.2f} GB/s, {1e6 * latency:.0f} us")
    for name in args.only:
        predicted, measured = predict(name, costs[name], splits[name], machine), spread(times[name])
        rows[name] = {"predicted": predicted, "measured": measured, "ratio": predicted / measured["median"]}
        print(
            f"{name:17} predicted {1e3 * predicted:8.1f} ms  measured {1e3 * measured['median']:8.1f} ms "
            f"[{1e3 * measured['min']:.1f}, {1e3 * measured['max']:.1f}]  ratio {rows[name]['ratio']:.3f}"
        )
    result = {
        "rows": rows,
        "splits": splits,
        "link": {"bytes_per_second": bandwidth, "latency": latency},
        "command": f"python benchmarks/simulated_vs_measured.py --repeats {args.repeats} --steps {args.steps}",
    }
    print(write("simulated_vs_measured", result))


if __name__ == "__main__":
    main()
