"""Claim: a million actions are simulated in under 10 s, on few devices or thousands; and 1,000 devices in steady state
(10,016 batches, 30 million actions and more) in under 10 s where times are constant.

Generating the schedule, simulating it, and computing all figures of the summary are included. Steady state is what
`simulate_method` takes for it; without jitter it is simulated in bulk, and what repeats is skipped.

python benchmarks/simulate_speed.py [--actions 1000000]
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from common import RESULTS, write

from unlatch.advise.prediction import simulate_method
from unlatch.methods.layerpipe.workload import simulate_layerpipe
from unlatch.plan.layer_costs import LayerCost
from unlatch.plan.layerpipe import plan_layerpipe
from unlatch.schedule import ZBH2, OneFOneB, Schedule, Workload, one_f_one_b_async, ticked
from unlatch.schedule.bulk import Figures
from unlatch.schedule.channel import Channel
from unlatch.schedule.machine import Machine
from unlatch.schedule.simulation import Simulation, simulate_schedule

WORK = Workload(sizes={"forward": 1e6, "backward": 1e6}, kept=4e6)
MACHINE = Machine(Channel(bandwidth=1e9, latency=1e-3), jitter=0.05)
MANY = 1000


def run(schedule: Schedule, actions: int, parts: int = 1) -> Simulation:
    per_batch = schedule.stages * (parts * (3 if schedule.splits_backward else 2) + 1)
    return simulate_schedule(schedule, WORK, batches=-(-actions // per_batch), microbatches=parts, machine=MACHINE)


def steady(method: str, devices: int) -> Simulation:
    """A network of unequal blocks, one per device, simulated until it is steady."""
    layers = [LayerCost(str(n), 1.0 + n % 3, 1.0 + n % 2, 1.0, 1e6, 4e6) for n in range(devices)]
    split = [layer.name for layer in layers[1:]]
    machine = Machine(Channel(bandwidth=1e9, latency=1e-3))
    return simulate_method(method, layers, devices, split=split, machine=machine, batch_size=4 * devices).simulation


def run_layerpipe(actions: int) -> Simulation:
    plan = plan_layerpipe([LayerCost(str(n), 1.0 + n % 3, 1.0 + n % 2, 1.0, 8, 4) for n in range(100)], 64)
    return simulate_layerpipe(plan, -(-actions // len(plan.tasks)), exact=False)


def actions_of(simulation: Simulation) -> int:
    """Forward, backward and update of every stage; more where the backward is in halves or tasks are placed."""
    if isinstance(simulation.figures, Figures):
        return len(simulation.devices) * (2 * sum(simulation.groups) + len(simulation.groups))
    return sum(map(len, simulation.timeline.streams))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file; another one for a trial")
    args = parser.parse_args()
    cases: dict[str, Callable[[], Simulation]] = {
        "pipedream, 16 devices": lambda: run(one_f_one_b_async(16), args.actions),
        "ticked, 64 devices": lambda: run(ticked(64), args.actions),
        "1f1b, 64 devices": lambda: run(OneFOneB(64), args.actions, parts=128),
        "zb-h2, 64 devices": lambda: run(ZBH2(64), args.actions, parts=128),
        "ticked, 4000 devices": lambda: run(ticked(4000), args.actions),
        "layerpipe, 64 devices": lambda: run_layerpipe(args.actions),
        **{f"{name}, {MANY} devices, steady": partial(steady, name, MANY) for name in ("fdg", "pipedream", "1f1b")},
    }
    found = {}
    for name, case in cases.items():
        start, cpu = time.perf_counter(), time.process_time()
        simulation = case()
        simulation.summary()
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        count = actions_of(simulation)
        found[name] = {"actions": count, "seconds": wall, "cpu_seconds": cpu, "per_million": 1e6 * wall / count}
        print(f"{name:24} {count:>9} actions  {wall:6.2f} s  ({cpu:.2f} s of device time)", flush=True)
    print(write("simulate_speed", {"load_average": os.getloadavg()[0], "cases": found}, args.out))


if __name__ == "__main__":
    main()
