"""Claim: at K=2 on 2 ranks with one thread each, a step of auxnet takes at most 0.65 of a step of one-process BP, for
ResNet-56 with AuxNets of one block per resolution (batch 100, fp32, channels_last).

    python benchmarks/auxnet_step_time.py [--repeats 7] [--steps 4] [--batch 100] [--depth 28 --widen 2]

Rounds are interleaved: every round measures BP on one rank while the other waits, then auxnet on both, and counts the
time in which all ranks that take part are at work. The terms of the speed-up formula are measured inside the same run;
from them follow the speed-up that it predicts and the number of stages at which there begins to be one. With 27 blocks
and AuxNets of 2 blocks and a stem, even halves would give about 0.54. `--widen N` takes a wide ResNet instead, and
writes `auxnet_step_time_wrn.json`; its `--depth` is 10, 16, 22 or 28.
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
from unlatch.methods.auxnet.partition import auxnet_split
from unlatch.methods.local.statistics import layer_parallel_times
from unlatch.models.resnet_cifar import CifarResNet
from unlatch.models.wide_resnet import WideResNet
from unlatch.nn.chain import chain

TARGET = 0.65
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (size,), generator=generator)


def model(depth: int, widen: int) -> nn.Module:
    torch.manual_seed(0)
    network = WideResNet(depth, widen) if widen else CifarResNet(depth)
    return network.to(memory_format=torch.channels_last)


def measure(depth: int, widen: int, size: int, steps: int, repeats: int) -> dict[str, Any]:
    """On every rank: when each step of each round was done, and what the method measured."""
    data, rank = batch(size), dist.get_rank()
    network = model(depth, widen)
    cut = [auxnet_split(chain(network), data[0], 2)] if rank == 0 else [None]
    dist.broadcast_object_list(cut)
    run = unlatch.parallelize(
        network, "auxnet", stages=2, loss_fn=cross_entropy, optimizer=SGD, split=cut[0], sample=data
    )
    plain = model(depth, widen)
    optimizer = SGD(plain.parameters())

    def plain_step() -> None:
        optimizer.zero_grad()
        cross_entropy(plain(data[0]), data[1]).backward()
        optimizer.step()

    def bp(count: int = steps) -> list[float]:
        dist.barrier()
        return completions(plain_step, count) if rank == 0 else []

    def auxnet(count: int = steps) -> list[float]:
        dist.barrier()
        return completions(lambda: run.step(*data), count)

    bp(1), auxnet(1)
    ends = interleave({"bp": bp, "auxnet": auxnet}, repeats)
    measured = run.method_statistics()
    run.close()
    return {"ends": ends, "measured": measured, "split": cut[0]}


def main() -> None:
    parser = options(__doc__, repeats=7, steps=4)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--depth", type=int, default=56)
    parser.add_argument("--widen", type=int, default=0, help="width of a wide ResNet; 0: an ordinary one")
    args = parser.parse_args()
    with unlatch.Ranks(2) as ranks:
        each = ranks.run(measure, args.depth, args.widen, args.batch, args.steps, args.repeats)
    found = each[0]
    rounds = {name: zip(*(rank["ends"][name] for rank in each), strict=True) for name in ("bp", "auxnet")}
    times = {name: [steady_seconds(ends) for ends in rows] for name, rows in rounds.items()}
    ratios = [a / b for a, b in zip(times["auxnet"], times["bp"], strict=True)]
    terms = layer_parallel_times(found["measured"])
    capacity = found["measured"][1].capacity
    result = {
        "seconds": {name: spread(values) for name, values in times.items()},
        "ratio": spread(ratios),
        "target": TARGET,
        "formula": {
            "terms": vars(terms),
            "speed_up_at_2": terms.speed_up(2),
            "break_even_stages": terms.break_even,
            "limit": terms.limit,
        },
        "auxnet": {"parameters": capacity.parameter_ratio, "flops": capacity.flop_ratio},
        "split": found["split"],
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
    }
    write("auxnet_step_time_wrn" if args.widen else "auxnet_step_time", result, args.out)
    median = result["ratio"]["median"]
    print(f"auxnet / bp: {median:.3f} (target {TARGET}), best {min(ratios):.3f}, worst {max(ratios):.3f}")
    print(f"speed-up {1 / median:.2f}, formula with measured terms {terms.speed_up(2):.2f}; ", end="")
    print(f"pays from K = {terms.break_even:.2f}, at most {terms.limit:.1f}")
    print(f"AuxNet: {capacity.flop_ratio:.1%} of the FLOPs it stands for; stage 1 starts at {found['split'][0]}")


if __name__ == "__main__":
    main()
