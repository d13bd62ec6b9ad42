"""What runs on one host of `slow_links.py`: every system, built once, and measured when it is asked to be.

It reads commands from standard input, one JSON object a line, and answers each with one line on standard output. All
ranks get the same commands in the same order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import unlatch
from unlatch.methods import get
from unlatch.models.gpt import GPT, next_token_loss
from unlatch.models.rev_transformer import RevGPT
from unlatch.nn.tree import tree_bytes
from unlatch.transport.wire import HEADER_BYTES

CONTEXT, WORDS, DEPTH, WIDTH, HEADS = 128, 256, 6, 448, 7
#: Micro-batches of synchronous pipelines, ours and torch's.
PARTS = 4
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
#: Sizes of the two bare messages that bandwidth and latency of a link are read off.
SMALL, LARGE = 250_000, 2_250_000


@dataclass(frozen=True)
class Ours:
    """One of our methods."""

    method: str
    parts: int = 1
    messages: str = "exact"
    reversible: bool = False

    def split(self, hosts: int) -> list[str]:
        """The blocks that start the second and later stages."""
        # The embedding cannot be inverted. In a stage of its own, on the first host, it leaves one that can.
        return ["layers.0", *cut(hosts)] if self.reversible else cut(hosts)

    def depth(self, hosts: int) -> int:
        """Batches that are under way when the pipeline is full, beside the newest one."""
        schedule = get(self.method, microbatches=self.parts).schedule(len(self.split(hosts)) + 1)
        return schedule.depth // self.parts


SYSTEMS: dict[str, Ours | None] = {
    "DDP": None,
    "torch 1F1B": None,
    "1f1b": Ours("1f1b", PARTS),
    "zb-h1": Ours("zb-h1", PARTS),
    "pipedream": Ours("pipedream"),
    "dsp": Ours("dsp"),
    "petra": Ours("petra", reversible=True),
    "pipedream bf16": Ours("pipedream", messages="bf16"),
    "pipedream int8": Ours("pipedream", messages="int8"),
}


def model(reversible: bool = False) -> nn.Module:
    torch.manual_seed(0)
    kind = RevGPT if reversible else GPT
    return kind(vocabulary=WORDS, context=CONTEXT, depth=DEPTH, width=WIDTH, heads=HEADS)


def cut(hosts: int) -> list[str]:
    """The blocks that start the second and later parts."""
    return [f"layers.{DEPTH * part // hosts}" for part in range(1, hosts)]


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(WORDS, (size, CONTEXT + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Unlatch:
    """One of our methods on all hosts."""

    def __init__(self, what: Ours, size: int) -> None:
        split = what.split(dist.get_world_size())
        self.data = batch(size)
        self.run = unlatch.parallelize(
            model(what.reversible),
            get(what.method, microbatches=what.parts),
            stages=len(split) + 1,
            split=split,
            loss_fn=next_token_loss,
            optimizer=SGD,
            sample=self.data,
            messages=what.messages,
            # Nobody is stuck who waits for a slow link.
            stall_limit=600.0,
        )

    def step(self) -> None:
        self.run.step(*self.data)

    def settle(self) -> None:
        """Leave nothing on the link for whoever is measured next."""
        self.run.flush()

    def costs(self, since: float) -> dict[str, Any]:
        """Mean seconds of each kind of entry at each station here, bytes of messages, and where stations are."""
        engine = self.run._engine
        found: dict[tuple[int, str], list[float]] = {}
        for event in engine.recorder.events:
            if event.start >= since:
                found.setdefault((event.stage, str(event.kind)), []).append(event.end - event.start)
        return {
            "times": [[station, kind, sum(all_) / len(all_)] for (station, kind), all_ in found.items()],
            "sizes": [[*route, size] for route, size in self._sizes().items()],
            "devices": list(engine.devices),
        }

    def _sizes(self) -> dict[tuple[str, int, int], int]:
        """By route, bytes of what this rank sends to others; one step is made to see them."""
        engine = self.run._engine
        routes = {(name, to): (name, sender, to) for e in engine.schedule.entries for name, sender, to in e.outgoing}
        found: dict[tuple[str, int, int], int] = {}
        send = engine.mail.send

        def noted(message: Any) -> None:
            route = routes.get((message.kind, message.stage))
            if route is not None and message.micro is not None:
                found[route] = tree_bytes(message.payload) + HEADER_BYTES
            send(message)

        engine.mail.send = noted  # type: ignore[method-assign]
        try:
            self.step()
            self.settle()
        finally:
            engine.mail.send = send  # type: ignore[method-assign]
        return found


class TorchPipelining:
    """torch.distributed.pipelining, cut as ours are."""

    def __init__(self, size: int) -> None:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        self.rank, hosts = dist.get_rank(), dist.get_world_size()
        whole = model()
        blocks = dict(_named_blocks(whole))
        names = list(blocks)
        bounds = [0, *(names.index(name) for name in cut(hosts)), len(names)]
        part = nn.Sequential(*list(blocks.values())[bounds[self.rank] : bounds[self.rank + 1]])
        stage = PipelineStage(part, self.rank, hosts, torch.device("cpu"))
        self.last = self.rank == hosts - 1
        self.schedule = Schedule1F1B(stage, PARTS, loss_fn=next_token_loss)
        self.optimizer, self.data = SGD(part.parameters()), batch(size)

    def step(self) -> None:
        x, y = self.data
        self.optimizer.zero_grad()
        given = (x,) if self.rank == 0 else ()
        aim: dict[str, Any] = {"target": y, "losses": []} if self.last else {}
        self.schedule.step(*given, **aim)
        self.optimizer.step()

    def settle(self) -> None:
        """Nothing is under way between two steps."""


def _named_blocks(whole: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in whole.named_modules()}
    for block in whole.blocks():  # type: ignore[operator, union-attr]
        yield names[id(block)], block


class DataParallel:
    """torch's DistributedDataParallel: every host has the whole model and its share of the batch."""

    def __init__(self, size: int) -> None:
        self.model = nn.parallel.DistributedDataParallel(model())
        self.optimizer = SGD(self.model.parameters())
        x, y = batch(size)
        rank, hosts = dist.get_rank(), dist.get_world_size()
        self.data = x.tensor_split(hosts)[rank], y.tensor_split(hosts)[rank]

    def step(self) -> None:
        x, y = self.data
        self.optimizer.zero_grad()
        next_token_loss(self.model(x), y).backward()
        self.optimizer.step()

    def settle(self) -> None:
        """Nothing is under way between two steps."""


class Bench:
    """Answers commands."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.systems: dict[str, Any] = {}
        self.since = 0.0

    def prepare(self, system: str) -> None:
        """Build a system, and make the steps that open connections."""
        ours = SYSTEMS[system]
        if ours is not None:
            self.systems[system] = Unlatch(ours, self.size)
        else:
            self.systems[system] = DataParallel(self.size) if system == "DDP" else TorchPipelining(self.size)
        self.systems[system].step()

    def measure(self, system: str, steps: int) -> dict[str, Any]:
        """When each step was done here, and bytes that left the host per step."""
        made = self.systems[system]
        dist.barrier()
        before, self.since, ends = int(SENT.read_text()), time.perf_counter(), []
        for _ in range(steps):
            made.step()
            ends.append(time.perf_counter())
        made.settle()
        dist.barrier()
        return {"ends": ends, "sent": (int(SENT.read_text()) - before) / steps}

    def costs(self, system: str) -> dict[str, Any] | None:
        """What the simulator needs, of the steps that were measured last."""
        made = self.systems[system]
        return made.costs(self.since) if isinstance(made, Unlatch) else None

    def link(self, count: int) -> dict[str, float]:
        """Seconds that bare messages of two sizes take from rank 0 to rank 1 and back, halved; the best counts."""
        found, rank = {}, dist.get_rank()
        for size in (SMALL, LARGE):
            payload = torch.zeros(size, dtype=torch.uint8)
            dist.barrier()
            seconds = []
            for _ in range(count if rank < 2 else 0):
                start = time.perf_counter()
                for sender in (0, 1):
                    if rank == sender:
                        dist.send(payload, 1 - rank)
                    else:
                        dist.recv(payload, 1 - rank)
                seconds.append((time.perf_counter() - start) / 2)
            found[str(size)] = min(seconds, default=0.0)
        return found


def serve(commands: Iterator[Mapping[str, Any]], bench: Bench) -> None:
    for command in commands:
        given = dict(command)
        answer = getattr(bench, given.pop("do"))(**given)
        print(json.dumps(answer), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(map(json.loads, sys.stdin), Bench(int(sys.argv[1])))
    # Runs would take leave of each other one by one; whoever started us has all that it wants.
    os._exit(0)


if __name__ == "__main__":
    main()
