"""How well the simulator predicts the time per batch (median of several rounds), for methods that run on 2 ranks with
a profiled model, and for methods on 8 ranks whose stages sleep.

The target was 10 % for any method. In the committed result, `results/simulated_vs_measured.json`, 19 of 28 reach it on
2 ranks, and all five that sleep on 8. Not: dsp, dtr, dtrp, layerpipe by stages, auglocal are predicted 12 to 17 % too
slow, dni 38 %, zb-h1, zb-h2 and auxnet 11 to 16 % too fast.

    python benchmarks/simulated_vs_measured.py [--repeats 9] [--steps 8] [--only 1f1b dtr] [--sleepers 8]

Measurements are lines of simulated_vs_measured.jsonl until all are done, so that a run that was stopped can be taken
up. Every method takes about 3 s a round on an idle machine, sleepers a minute: 12 minutes with `--repeats 5 --steps 6`.

Rounds are short, and each predicts and measures every method within seconds, in turns which comes first, because the
speed of a machine drifts within minutes. The ratio of each round counts. Nothing is fitted to the runs: what goes into
a prediction is measured on both ranks at the same time, as they will also train at the same time.

- Costs of the blocks at the size of a micro-batch. Each rank measures those of its own stage and no others, so that as
  much memory is in use as in training. The mean over passes, not the best:
  jitter has mean 1, and only means of blocks add up to the mean of a stage.
- The update of each rank's stage as an action of its own, with the copy of its weights where older ones are needed.
- An action: the CPU time that a stage of one number takes per action, with messages of a few bytes.
- The jitter of each rank's own stage. Predictions are the mean over several seeds.
- A message of the size that crosses the border. With as many ranks as cores its CPU time is charged to both ends.

Stages that sleep leave the cores free, so that their messages travel beside the work. Their forward sleeps 20 ms and
their backward 40 ms; predictions for them know nothing but that, and what an action and a message take.

The measured time is that of the steady state in which all ranks are at work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from common import Finished, completions, options, spread, steady_seconds, write
from layerpipe_speed import COSTS
from layerpipe_speed import model as chain_model
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import unlatch
from unlatch.advise.prediction import simulate_method
from unlatch.errors import UnlatchError
from unlatch.methods import LayerPipe, Method, get, names
from unlatch.methods.layerpipe.workload import simulate_layerpipe
from unlatch.models import build
from unlatch.nn.chain import Block, chain
from unlatch.nn.parts import in_parts
from unlatch.nn.tree import split_batch, tree_bytes
from unlatch.plan import Plan, jitter, profile
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine
from unlatch.throughput import Courier, action_seconds, channel

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)
SEEDS = 8
Batch = tuple[torch.Tensor, torch.Tensor]
Row = dict[str, Any]


def images(size: int = 64) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (size,), generator=generator)


def vectors(size: int = 512) -> Batch:
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
    data: Callable[[], Batch]

    def start(self, plan: Plan | None) -> unlatch.Run:
        where: dict[str, Any] = {} if self.places_tasks else {"sample": self.data(), "plan": plan}
        return unlatch.parallelize(self.model(), self.method, stages=2, loss_fn=cross_entropy, optimizer=SGD, **where)

    @property
    def places_tasks(self) -> bool:
        return isinstance(self.method, LayerPipe) and self.method.places_tasks

    @property
    def parts(self) -> int:
        return int(self.method.microbatches)

    @property
    def keeps_weights(self) -> bool:
        """Whether an update of this rank's stage must leave the weights before it intact."""
        return self.method.rules().backward.copies(self.method.lateness(2)[dist.get_rank()]) > 0


RESNET, REVNET = partial(picture_net, "resnet20"), partial(picture_net, "revnet14")


def _with_parts(name: str) -> Method:
    """Four micro-batches for a pipeline that is emptied, one for others, two where one is too few."""
    if get(name).schedule(2).flushes:
        return get(name, microbatches=4)
    try:
        found = get(name, microbatches=1)
        found.schedule(2)
    except UnlatchError:
        return get(name, microbatches=2)
    return found


CASES = {
    **{
        name: Case(_with_parts(name), REVNET if get(name).inverts else RESNET, images)
        for name in names()
        if name != "layerpipe"
    },
    "layerpipe stages": Case(LayerPipe(mode="stages", microbatches=1), RESNET, images),
    "pipedream chain": Case(get("pipedream", microbatches=1), chain_model, vectors),
    "layerpipe chain": Case(LayerPipe(costs=COSTS, microbatches=1), chain_model, vectors),
}


class Bench:
    """What a rank keeps between calls."""

    courier: Courier


def open_bench() -> None:
    torch.set_num_threads(1)
    Bench.courier = Courier()


def prepare(name: str) -> Plan:
    """Where the model is cut, or its tasks are placed; the same in every round."""
    with CASES[name].start(None) as run:
        return run.plan


def split_of(name: str, plan: Plan) -> list[str] | None:
    """The blocks that start stages, if stages are whole."""
    return None if CASES[name].places_tasks else [plan.blocks[start] for start in plan.starts[1:]]


def train(name: str, steps: int, plan: Plan) -> list[float]:
    """When each step was done on this rank. Ranks end all runs with the call that made them."""
    x, y = CASES[name].data()
    with CASES[name].start(plan) as run:
        for _ in range(1 + run.schedule.depth):
            run.step(x, y)
        dist.barrier()
        ends = completions(lambda: run.step(x, y), steps)
        run.flush()
    return ends


@dataclass(frozen=True)
class Observation:
    """What one rank measured: its layers for one batch, jitter, size, CPU and time of a message, and its update."""

    layers: list[LayerCost]
    jitter: float
    message: tuple[int, float, float]
    update: float


def observe(name: str, split: list[str] | None) -> Observation:
    """Measure all that a prediction needs, on both ranks at once."""
    case = CASES[name]
    x, y = split_batch(case.data(), case.parts)[0]
    blocks = in_parts(chain(case.model()), split or ())
    loss = partial(_loss, y)
    own, entry, ends = _own_stage(blocks, x, split)
    own_loss = loss if ends else None
    # The first block of a profile needs no gradient of its input; that of an upper stage does.
    front = [Block("border", nn.Identity())] if own[0] is not blocks[0] else []
    dist.barrier()
    found = profile([*front, *own], entry, own_loss, repeats=4, centre="mean")[len(front) :]
    update = _update_seconds(nn.ModuleList(block.module for block in own), case.keeps_weights)
    dist.barrier()
    spread_of_times = jitter(own, entry, own_loss, repeats=8)
    size = _border_bytes(blocks, x, split)
    return Observation(
        [
            LayerCost(
                cost.name,
                cost.forward * case.parts,
                cost.input_grad * case.parts,
                cost.weight_grad * case.parts,
                activation_bytes=cost.output_bytes * case.parts,
                weight_bytes=cost.weight_bytes,
            )
            for cost in found
        ],
        spread_of_times,
        (size, *Bench.courier.cost(size)),
        update,
    )


def _loss(target: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, target)


def _border_bytes(blocks: list[Block], x: Any, split: list[str] | None) -> int:
    """Of the largest message between the ranks."""
    sizes = []
    with torch.no_grad():
        for block, above in pairwise(blocks):
            x = block.module(x)
            if split is None or above.name in split:
                sizes.append(tree_bytes(x))
    return max(sizes)


def _own_stage(blocks: list[Block], x: Any, split: list[str] | None) -> tuple[list[Block], Any, bool]:
    """This rank's blocks, their input, and whether the loss is theirs; where tasks are placed, all blocks."""
    if split is None:
        return blocks, x, True
    border = next(n for n, block in enumerate(blocks) if block.name == split[0])
    if dist.get_rank() == 0:
        return blocks[:border], x, False
    with torch.no_grad():
        for block in blocks[:border]:
            x = block.module(x)
    return blocks[border:], x, True


def _update_seconds(module: nn.Module, keeps_weights: bool) -> float:
    params = list(module.parameters())
    if not params:
        return 0.0
    optimizer, seconds = SGD(params), []
    for _ in range(4):
        for p in params:
            p.grad = torch.zeros_like(p)
        start = time.perf_counter()
        if keeps_weights:
            for p in params:
                p.data = p.data.clone()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    # The first update also makes room for the momentum.
    return statistics.fmean(seconds[1:])


def predict(name: str, split: list[str] | None, seen: Sequence[Observation], action: float) -> tuple[float, Machine]:
    """Seconds per batch in steady state, from what each rank measured; and the machine it is for."""
    size, busy, seconds = (statistics.fmean(values) for values in zip(*(rank.message for rank in seen), strict=True))
    spread_of_times = math.sqrt(statistics.fmean(rank.jitter**2 for rank in seen))
    # Where tasks are placed, both ranks have measured the update of all layers, and share it.
    shared = 2 if split is None else 1
    updates = [rank.update / shared for rank in seen]
    machine = Machine(channel(int(size), busy, seconds), jitter=spread_of_times, action=action, update=updates)
    seeded = [replace(machine, seed=seed) for seed in range(SEEDS)]
    return statistics.fmean(_simulated(CASES[name], split, seen, one) for one in seeded), machine


def _simulated(case: Case, split: list[str] | None, seen: Sequence[Observation], machine: Machine) -> float:
    if split is None:
        assert isinstance(case.method, LayerPipe)
        plan = plan_layerpipe(COSTS, 2, case.method.mode)
        homes = {task.layer: task.device for task in plan.tasks if task.kind == "F"}
        layers = tuple(seen[homes[n]].layers[n] for n in range(len(homes)))
        return float(simulate_layerpipe(replace(plan, layers=layers), 40, machine, exact=False).interval)
    return simulate_method(
        case.method, [*seen[0].layers, *seen[1].layers], 2, split=split, machine=machine
    ).time_per_batch


def one_round(ranks: unlatch.Ranks, name: str, plan: Plan, steps: int, action: float, predict_first: bool) -> Row:
    split = split_of(name, plan)
    if predict_first:
        seen = ranks.run(observe, name, split)
        measured = steady_seconds(ranks.run(train, name, steps, plan))
    else:
        measured = steady_seconds(ranks.run(train, name, steps, plan))
        seen = ranks.run(observe, name, split)
    predicted, machine = predict(name, split, seen, action)
    link: Any = machine.channel
    return {
        "predicted": predicted,
        "measured": measured,
        "jitter": machine.jitter,
        "link_bytes_per_second": link.bandwidth,
        "link_latency": link.latency,
        "split": split,
    }


def told(row: Row) -> str:
    return (
        f"predicted {1e3 * row['predicted']:7.1f} ms  measured {1e3 * row['measured']:7.1f} ms  "
        f"ratio {row['predicted'] / row['measured']:.3f}  (jitter {row['jitter']:.1%}, "
        f"link {row['link_bytes_per_second'] / 1e9:.2f} GB/s + {1e3 * row['link_latency']:.2f} ms)"
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    columns = ("predicted", "measured", "jitter", "link_bytes_per_second", "link_latency")
    ratio = spread([row["predicted"] / row["measured"] for row in rows])
    return {"ratio": ratio, **{name: spread([row[name] for row in rows]) for name in columns}}


# --------------------------------------------------------------------------------- sleepers


FORWARD, BACKWARD = 0.02, 0.04
SLEEPING = ("1f1b", "zb-h1", "pipedream", "fdg", "dtr")


def small_costs() -> tuple[float, float]:
    """Seconds of an action, and of a message of a few numbers on its way."""
    return action_seconds(), Bench.courier.cost(64)[1]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(BACKWARD)
        return g


class Sleeper(nn.Module):
    """One weight, and a nap in each direction."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Sleep.apply(x * self.scale)
        return found


def sleep_run(name: str, stages: int) -> unlatch.Run:
    method = get(name, microbatches=2 * stages if get(name).schedule(2).flushes else 1)
    model = nn.Sequential(*(Sleeper() for _ in range(stages)))
    split = [str(n) for n in range(1, stages)]
    return unlatch.parallelize(model, method, stages=stages, split=split, loss_fn=mse_loss, optimizer=SGD)


def sleeping(name: str, stages: int, steps: int) -> list[float]:
    """When each step was done on this rank, the pipeline full."""
    torch.set_num_threads(1)
    x = torch.ones(2 * stages, 4)
    with sleep_run(name, stages) as run:
        for _ in range(run.schedule.depth):
            run.step(x, x)
        # Far ranks run apart by as many steps as there are stages, before all are at work.
        more = stages if run.schedule.flushes else 4 * stages
        dist.barrier()
        ends = completions(lambda: run.step(x, x), steps + more)
        run.flush()
    return ends


def predict_sleeping(name: str, stages: int, action: float, message: float) -> float:
    # A split backward sleeps with its input gradient; the weight gradient is one product.
    layers = [LayerCost(str(n), FORWARD, BACKWARD, 0.0) for n in range(stages)]
    layers[0] = replace(layers[0], D=0.0, G=BACKWARD)
    parts = 2 * stages if get(name).schedule(2).flushes else 1
    layers = [replace(layer, F=layer.F * parts, D=layer.D * parts, G=layer.G * parts) for layer in layers]
    machine = Machine(Channel(latency=message), action=action)
    split = [str(n) for n in range(1, stages)]
    return simulate_method(get(name, microbatches=parts), layers, stages, split=split, machine=machine).time_per_batch


def sleepers(stages: int, repeats: int, steps: int, costs: tuple[float, float], done: Finished) -> dict[str, Any]:
    predicted = {name: predict_sleeping(name, stages, *costs) for name in SLEEPING}
    ratios: dict[str, list[float]] = {name: [] for name in SLEEPING}
    with unlatch.Ranks(stages) as ranks:

        def one(name: str) -> Row:
            return {
                "predicted": predicted[name],
                "measured": steady_seconds(ranks.run(sleeping, name, stages, steps)),
            }

        for turn in range(repeats):
            for name in SLEEPING:
                row = done.once(partial(one, name), case=f"{name}, {stages} sleeping", round=turn, steps=steps)
                ratios[name].append(row["predicted"] / row["measured"])
                print(f"round {turn + 1} {stages} sleepers, {name:10} ratio {ratios[name][-1]:.3f}", flush=True)
    return {f"{name}, {stages} sleeping": {"ratio": spread(found)} for name, found in ratios.items()}


def main() -> None:
    parser = options(__doc__, repeats=9, steps=8)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sleepers", type=int, default=8, help="ranks that sleep; 0 for none")
    args = parser.parse_args()
    start, done = time.perf_counter(), Finished(args.out / "simulated_vs_measured.jsonl")
    rows: dict[str, list[Row]] = {name: [] for name in args.only}
    plans: dict[str, Plan] = {}
    with unlatch.Ranks(2) as ranks:
        ranks.run(open_bench)
        action, message = (statistics.fmean(found) for found in zip(*ranks.run(small_costs), strict=True))

        def one(name: str, turn: int) -> Row:
            if name not in plans:
                plans[name] = ranks.run(prepare, name)[0]
            return one_round(ranks, name, plans[name], args.steps, action, predict_first=turn % 2 == 0)

        for turn in range(args.repeats):
            for name in args.only:
                row = done.once(partial(one, name, turn), case=name, round=turn, steps=args.steps)
                rows[name].append(row)
                print(f"round {turn + 1} {name:17} {told(row)}", flush=True)
    print(f"{args.repeats} rounds in {time.perf_counter() - start:.0f} s")
    found = {name: summary(mine) for name, mine in rows.items()}
    for name, one_of in found.items():
        ratio = one_of["ratio"]
        print(f"{name:17} predicted / measured {ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}]")
    if args.sleepers:
        found |= sleepers(args.sleepers, args.repeats, args.steps, (action, message), done)
    result = {
        "rows": found,
        "action_seconds": action,
        "message_seconds": message,
        "splits": {name: mine[-1]["split"] for name, mine in rows.items()},
    }
    print(write("simulated_vs_measured", result, args.out))
    done.over()


if __name__ == "__main__":
    main()
