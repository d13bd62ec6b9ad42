"""Claim: a chain of 1,000 layers on 64 devices is planned in under 2 s, in every mode.

python benchmarks/plan_speed.py [--layers 1000] [--devices 64] [--repeats 3]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from common import interleave, spread, write

from unlatch.methods.layerpipe.list_schedule import plan_list
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.plan.pipedream import plan_pipedream, plan_straight
from unlatch.schedule.channel import Channel


def chain(layers: int) -> list[LayerCost]:
    """Costs as a measurement gives them: floats without a common divisor."""
    draw = random.Random(0)

    def cost() -> float:
        return draw.lognormvariate(0, 0.8)

    return [
        LayerCost(f"layer{n}", cost(), cost(), cost(), draw.randrange(1000, 9000), draw.randrange(1000, 9000))
        for n in range(layers)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    costs, count = chain(args.layers), args.devices
    slow = Channel(bandwidth=2e4, overlapped=False)
    planners: dict[str, Callable[[], object]] = {
        "layerpipe, divisible": lambda: plan_layerpipe(costs, count),
        "layerpipe, atomic": lambda: plan_layerpipe(costs, count, "atomic"),
        "layerpipe, factor": lambda: plan_layerpipe(costs, count, "factor"),
        "layerpipe, atomic, links": lambda: plan_layerpipe(costs, count, "atomic", channel=slow),
        "tasks anywhere": lambda: plan_list(costs, count),
        "pipedream, straight": lambda: plan_straight(costs, count),
        "pipedream, replicas, one level": lambda: plan_pipedream(costs, count, 2e4),
        "pipedream, replicas, 8 x 8": lambda: plan_pipedream(costs, [8, count // 8], [2e4, 5e3]),
    }

    # Processor time, which is that of an otherwise idle machine: planning is one thread and waits for nothing.
    clock = time.process_time

    def timed(plan: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            start = clock()
            plan()
            return clock() - start

        return measure

    times = interleave({name: timed(plan) for name, plan in planners.items()}, args.repeats)
    found = {name: spread(values) for name, values in times.items()}
    for name, row in found.items():
        print(f"{name:32} {row['median']:.2f} s [{row['min']:.2f}, {row['max']:.2f}]")
    print(write("plan_speed", {"seconds": found}))


if __name__ == "__main__":
    main()
