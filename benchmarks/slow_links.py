"""Expected, and not shown yet by a committed result file: between two hosts on a limited link

- DDP, which sends all gradients, keeps less than half of its speed at 100 Mb/s;
- methods whose order has a batch to spare (dsp, petra) keep at least 0.9 on every link that carries what a round sends
  each way in less than half of the time that the round takes;
- methods without (1f1b, zb-h1, pipedream) lose about the time of a message per round on every link, so that rounded
  messages help them: pipedream with int8 keeps at least 0.9 at 25 Mb/s;
- the simulator, given costs measured without a limit, predicts the speed of our methods on every link within 15 %.

    python benchmarks/slow_links.py [--hosts 2] [--rounds 5] [--steps 6] [--links 1000 100 25 10] [--quick]

Hosts are network namespaces of this machine (root is needed), one rank with one thread each, joined by a switch. What
leaves a host goes through a token bucket (`tc tbf`). A GPT of 14.8 M parameters (petra: a reversible one of 14.9 M),
sequences of 128 tokens, batch 8: states of 1.8 MB; DDP sends 59 MB of gradients from each host. Synchronous pipelines
work on 4 micro-batches, the others on whole batches.

Each round goes through all links, from none to the slowest, and on each through all systems. A row has

- samples per second while all hosts are at work, and their ratio to the same system in the same round without a limit,
- bytes per step that left all hosts, as the interfaces counted them without a limit,
- for our methods, what the simulator says: each entry takes the mean time that it took without a limit in the same
  round, a message has its own bytes, and the link the bandwidth and latency of bare messages over it.

A system breaks down on the first link on which it loses more than a tenth. On three hosts the one in the middle sends
both ways over one cable, and the simulator, which has a wire for each, promises too much there.

`--quick` has half of the batch, one round, 4 steps, 100 and 25 Mb/s only: it shows that everything runs. Finished
measurements are lines of slow_links.jsonl; what is there is not measured again, so that it can be done in parts:
`--links 100 --systems DDP "torch 1F1B" pipedream dsp petra` takes about 10 minutes on an idle machine, the same with
`--links 100 25` and `"pipedream int8"` as much again, of which DDP at 25 Mb/s has half.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import RESULTS, Finished, spread, steady_seconds, write
from slow_link_systems import LARGE, SMALL, SYSTEMS, Ours

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import net_hosts  # noqa: E402
import unlatch  # noqa: E402
from unlatch.methods import get  # noqa: E402
from unlatch.schedule import Kind  # noqa: E402
from unlatch.schedule.channel import Channel  # noqa: E402
from unlatch.schedule.machine import Machine  # noqa: E402
from unlatch.schedule.simulation import simulate_schedule  # noqa: E402
from unlatch.schedule.workload import Workload  # noqa: E402

PORT = 29500
#: Steps before those that count, and seconds that one measurement should not much exceed.
WARM, BUDGET = 3, 25.0
#: Seconds in which every answer comes.
PATIENCE = 900.0
#: What is left of the speed where a system has not broken down.
KEEPS = 0.9

Row = dict[str, Any]


class Rank:
    """The program on one host."""

    def __init__(self, host: net_hosts.Host, hosts: Sequence[net_hosts.Host], size: int, folder: Path) -> None:
        self.log = folder / f"host{host.number}.log"
        meeting = {
            "RANK": str(host.number),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(PORT),
            "PYTHONPATH": os.pathsep.join([str(Path(unlatch.__file__).parents[1]), str(Path(__file__).parent)]),
        }
        command = [sys.executable, str(Path(__file__).with_name("slow_link_systems.py")), str(size)]
        with self.log.open("wb") as log:
            self._program = host.start(command, meeting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)

    def ask(self, command: Mapping[str, Any]) -> None:
        assert self._program.stdin is not None
        self._program.stdin.write(json.dumps(command).encode() + b"\n")
        self._program.stdin.flush()

    def answer(self) -> Any:
        out = self._program.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], PATIENCE)
        line = out.readline() if ready else b""
        if not line:
            raise SystemExit(f"{self.log.name}: no answer\n{self.log.read_text()[-2000:]}")
        return json.loads(line)


class Network:
    """Hosts with what runs there."""

    def __init__(self, hosts: list[net_hosts.Host], size: int, folder: Path) -> None:
        self.hosts = hosts
        self.ranks = [Rank(host, hosts, size, folder) for host in hosts]
        self._prepared: set[str] = set()

    def all(self, do: str, **arguments: Any) -> list[Any]:
        """What all ranks answer."""
        for rank in self.ranks:
            rank.ask({"do": do, **arguments})
        return [rank.answer() for rank in self.ranks]

    def limit(self, megabits: float | None) -> None:
        for host in self.hosts:
            host.limit(megabits)

    def prepare(self, systems: Sequence[str]) -> None:
        for system in systems:
            if system not in self._prepared:
                self.all("prepare", system=system)
                self._prepared.add(system)


@contextmanager
def network(count: int, size: int) -> Iterator[Network]:
    """Hosts that are removed whatever happens; the program ends, with the reason, where there can be none."""
    if (reason := net_hosts.missing(limited=True)) is not None:
        raise SystemExit(f"skipped: {reason}")
    # So that hosts are removed then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        try:
            hosts = stack.enter_context(net_hosts.hosts(count))
            # Whether links can be limited shows now rather than in the middle.
            hosts[0].limit(1000)
            hosts[0].limit(None)
        except OSError as error:
            raise SystemExit(f"skipped: network namespaces, or limits on them, are not allowed here: {error}") from None
        yield Network(hosts, size, logs)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    hosts: int
    size: int
    rounds: int
    steps: int
    links: tuple[float | None, ...]
    systems: tuple[str, ...]

    def key(self, turn: int, link: float | None, system: str) -> dict[str, Any]:
        return {"hosts": self.hosts, "batch": self.size, "round": turn, "link": link, "system": system}


def measure(plan: Plan, done: Finished) -> None:
    """All that is not done yet."""
    wanted = [
        (turn, link, system)
        for turn in range(plan.rounds)
        for link in plan.links
        for system in ("link", *plan.systems)
        if done.find(**plan.key(turn, link, system)) is None
    ]
    if not wanted:
        return
    with network(plan.hosts, plan.size) as net:
        net.prepare([system for system in plan.systems if any(system == name for _, _, name in wanted)])
        now: object = ...
        for turn, link, system in wanted:
            if link != now:
                net.limit(link)
                now = link
            key = plan.key(turn, link, system)
            row = {**key, **(_bare(net, link) if system == "link" else _system(net, plan, done, key))}
            done.add(row)
            shown = (
                f"{row['samples_per_s']:8.2f} samples/s" if system != "link" else f"{row['bandwidth'] / 1e6:.1f} MB/s"
            )
            print(f"round {turn + 1}  {_name(link):10} {system:15} {shown}", flush=True)


def _bare(net: Network, link: float | None) -> Row:
    """Bandwidth and latency of a link, from bare messages of two sizes."""
    seconds = net.all("link", count=3 if link is not None and link < 100 else 10)[0]
    small, large = seconds[str(SMALL)], seconds[str(LARGE)]
    # On a link without a limit the noise of a moment may hide the difference.
    bandwidth = (LARGE - SMALL) / (large - small) if large > small else LARGE / large
    return {"bandwidth": bandwidth, "latency": max(0.0, small - SMALL / bandwidth)}


def _system(net: Network, plan: Plan, done: Finished, key: Mapping[str, Any]) -> Row:
    """One system on one link; fewer steps where a step takes long."""
    ours, link = SYSTEMS[key["system"]], key["link"]
    free = done.find(**{**key, "link": None})
    depth = ours.depth(plan.hosts) if ours is not None else 0
    # Ranks of a pipeline are apart by what is under way: fewer steps leave no time in which all of them are at work.
    least, warm = (2, 1) if ours is None else (depth + 3, max(WARM, depth + 2))
    steps = max(least, plan.steps)
    if free is not None and link is not None:
        expected = max(free["seconds"], max(free["sent"]) / (link * 1e6 / 8))
        steps = max(least, min(steps, int(BUDGET / expected) - warm))
    found = net.all("measure", system=key["system"], steps=warm + steps)
    seconds = steady_seconds([rank["ends"] for rank in found], warm)
    sent = [rank["sent"] for rank in found]
    row: Row = {"samples_per_s": plan.size / seconds, "seconds": seconds, "bytes_per_step": sum(sent), "sent": sent}
    if link is None and ours is not None:
        row["costs"] = net.all("costs", system=key["system"])
    return row


def predicted_seconds(system: str, free: Row, link: Row) -> float | None:
    """Per batch, as the simulator has it; nothing for systems that are not ours."""
    ours = SYSTEMS[system]
    if not isinstance(ours, Ours) or "costs" not in free:
        return None
    parts: list[Any] = free["costs"]
    devices = parts[0]["devices"]
    times: list[dict[Kind, float]] = [{} for _ in devices]
    sizes: dict[Any, float] = {}
    for part in parts:
        for station, kind, seconds in part["times"]:
            times[station][Kind(kind)] = seconds
        for name, sender, receiver, size in part["sizes"]:
            sizes[name, sender, receiver] = size
    machine = Machine(Channel(link["bandwidth"], latency=link["latency"]))
    method = get(ours.method, microbatches=ours.parts)
    run = simulate_schedule(
        method.schedule(len(devices)),
        Workload(times, sizes),
        batches=40,
        microbatches=ours.parts,
        devices=devices,
        machine=machine,
    )
    return float(run.interval) * ours.parts


def summary(plan: Plan, done: Finished) -> list[Row]:
    """One row for each system and link: medians over rounds, with their spread."""
    rows = []
    for system in plan.systems:
        for link in plan.links:
            speeds, ratios, sent, said = [], [], [], []
            for turn in range(plan.rounds):
                row, free = done.find(**plan.key(turn, link, system)), done.find(**plan.key(turn, None, system))
                bare = done.find(**plan.key(turn, link, "link"))
                if row is None or free is None or bare is None:
                    continue
                speeds.append(row["samples_per_s"])
                ratios.append(row["samples_per_s"] / free["samples_per_s"])
                sent.append(free["bytes_per_step"])
                seconds = predicted_seconds(system, free, bare)
                if seconds is not None:
                    said.append((plan.size / seconds, row["samples_per_s"]))
            if not speeds:
                continue
            found: Row = {
                "system": system,
                "link": link,
                "samples_per_s": spread(speeds),
                "ratio": spread(ratios),
                "bytes_per_step": statistics.median(sent),
            }
            if said:
                found["predicted_samples_per_s"] = statistics.median(one for one, _ in said)
                found["predicted_over_measured"] = spread([one / other for one, other in said])
            rows.append(found)
    return rows


def breakdowns(rows: Sequence[Row]) -> dict[str, float | None]:
    """By system the first link, from fast to slow, on which it loses more than a tenth; `None` for none."""
    found: dict[str, float | None] = {}
    for row in rows:
        broken = row["link"] is not None and row["ratio"]["median"] < KEEPS
        if found.get(row["system"]) is None:
            found[row["system"]] = row["link"] if broken else None
    return found


def _name(link: float | None) -> str:
    return "no limit" if link is None else f"{link:g} Mb/s"


def show(rows: Sequence[Row]) -> None:
    print(
        f"{'system':15} {'link':>10} {'samples/s':>10} {'ratio':>6} {'MB/step':>8} {'predicted':>10} {'pred/meas':>10}"
    )
    for row in rows:
        told = row.get("predicted_over_measured")
        said = f"{row['predicted_samples_per_s']:10.2f} {told['median']:10.3f}" if told else f"{'':10} {'':10}"
        print(
            f"{row['system']:15} {_name(row['link']):>10} {row['samples_per_s']['median']:10.2f} "
            f"{row['ratio']['median']:6.2f} {row['bytes_per_step'] / 1e6:8.2f} {said}"
        )


def draw(rows: Sequence[Row], links: Sequence[float | None], path: Path) -> None:
    """Speed over links: measured as lines, predicted as crosses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    places = {link: place for place, link in enumerate(links)}
    for number, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
        own = [row for row in rows if row["system"] == system]
        at = [places[row["link"]] for row in own]
        colour = f"C{number}"
        axes.plot(at, [row["samples_per_s"]["median"] for row in own], "o-", color=colour, label=system)
        told = [row for row in own if "predicted_samples_per_s" in row]
        crosses = [row["predicted_samples_per_s"] for row in told]
        axes.plot([places[row["link"]] for row in told], crosses, "x", color=colour, markersize=9)
    axes.set_xticks(range(len(links)), [_name(link) for link in links])
    axes.set_yscale("log")
    axes.set_ylabel("samples per second (crosses: the simulator)")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, choices=(2, 3), default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="steps per measurement that count; fewer where they take long")
    parser.add_argument("--links", type=float, nargs="+", metavar="MEGABITS", help="from fast to slow")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--quick", action="store_true", help="a trial of everything")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files; another one for a trial")
    args = parser.parse_args()
    plan = Plan(
        hosts=args.hosts,
        size=4 if args.quick else 8,
        rounds=args.rounds or (1 if args.quick else 5),
        steps=args.steps or (4 if args.quick else 6),
        links=(None, *(args.links or ([100, 25] if args.quick else [1000, 100, 25, 10]))),
        systems=tuple(args.systems),
    )
    name = "slow_links" + ("" if args.hosts == 2 else f"_{args.hosts}_hosts") + ("_quick" if args.quick else "")
    args.out.mkdir(parents=True, exist_ok=True)
    start, done = time.perf_counter(), Finished(args.out / f"{name}.jsonl")
    measure(plan, done)
    rows = summary(plan, done)
    show(rows)
    broken = breakdowns(rows)
    for system, link in broken.items():
        print(f"{system:15} {'holds on every link' if link is None else f'breaks down at {_name(link)}'}")
    print(f"{time.perf_counter() - start:.0f} s")
    draw(rows, plan.links, args.out / f"{name}.png")
    result = {
        "rows": rows,
        "breaks_down_at": broken,
        "hosts": plan.hosts,
        "batch": plan.size,
        "rounds": plan.rounds,
    }
    print(write(name, result, args.out))


if __name__ == "__main__":
    main()
