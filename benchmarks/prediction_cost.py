"""Expected, and not shown yet by a committed result file: predicting weights costs next to nothing: a step of dtrp
takes at most 1.02 times one of dtr, on a GPT of 10 M parameters with AdamW and on ResNet-20 with Nesterov momentum.

    python benchmarks/prediction_cost.py [--repeats 9] [--steps 6] [--ranks] [--only gpt]

The measure is CPU time per step with both stages in one process and one micro-batch per batch, so that every forward of
the first stage predicts, and nothing but prediction differs. Rounds are interleaved, in turns which comes first; the
ratio of each round counts. `--ranks` also measures seconds per step on 2 ranks, each with the cut of its own plan: what
a user sees, and what moves more. Rounds are lines of prediction_cost.jsonl until all are
done, so that a run that was stopped can be taken up. About 4 minutes on an idle machine, 8 with `--ranks`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Finished, completions, options, spread, steady_seconds, write
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.models import build
from unlatch.models.gpt import GPT, next_token_loss
from unlatch.nn import chain

METHODS = ("dtr", "dtrp")


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (64,), generator=generator)


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(256, (2, 8, 128), generator=generator)
    return x, y


@dataclass(frozen=True)
class Case:
    """A model with its data and optimizer."""

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[..., torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]

    def start(self, name: str, *, inline: bool) -> unlatch.Run:
        torch.manual_seed(0)
        model = self.model()
        blocks = chain(model)
        # Inline the cut must not depend on a measurement.
        where: dict[str, Any] = {"split": [blocks[len(blocks) // 2].name]} if inline else {"sample": self.data()}
        method = unlatch.methods.get(name, microbatches=1)
        options = {"loss_fn": self.loss, "optimizer": self.optimizer, "distributed": not inline}
        return unlatch.parallelize(model, method, stages=2, **options, **where)


CASES = {
    "gpt": Case(
        partial(GPT, vocabulary=256, context=128, width=384, depth=5, heads=6),
        texts,
        next_token_loss,
        partial(torch.optim.AdamW, lr=1e-4),
    ),
    "resnet20": Case(
        lambda: build("resnet20").to(memory_format=torch.channels_last),
        pictures,
        cross_entropy,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True),
    ),
}


Round = Callable[[str], float]


@contextmanager
def inline(case: str, steps: int) -> Iterator[Round]:
    """What measures CPU seconds per step of a method, both stages in this process."""
    torch.set_num_threads(1)
    runs, data = {name: CASES[case].start(name, inline=True) for name in METHODS}, CASES[case].data()

    def seconds(name: str) -> float:
        begun = time.process_time()
        for _ in range(steps):
            runs[name].step(*data)
        return (time.process_time() - begun) / steps

    for name in METHODS:
        seconds(name)
    yield seconds


def on_rank(case: str, name: str, steps: int) -> list[float]:
    torch.set_num_threads(1)
    data = CASES[case].data()
    with CASES[case].start(name, inline=False) as run:
        dist.barrier()
        return completions(lambda: run.step(*data), steps)


@contextmanager
def on_ranks(case: str, steps: int) -> Iterator[Round]:
    """What measures seconds per step of a method on 2 ranks."""
    with unlatch.Ranks(2) as ranks:
        yield lambda name: steady_seconds(ranks.run(on_rank, case, name, max(8, steps)))


WHERE: dict[str, Callable[[str, int], AbstractContextManager[Round]]] = {"inline CPU": inline, "2 ranks": on_ranks}


def rounds(case: str, where: str, repeats: int, steps: int, done: Finished) -> dict[str, list[float]]:
    """Seconds of each method round by round, in turns which comes first; only what is not done yet is measured."""
    key = {"case": case, "where": where, "steps": steps}
    missing = [turn for turn in range(repeats) if done.find(**key, round=turn) is None]
    if missing:
        with WHERE[where](case, steps) as seconds:
            for turn in missing:
                found = {name: seconds(name) for name in METHODS[:: 1 if turn % 2 == 0 else -1]}
                done.add({**key, "round": turn, "seconds": found})
    rows = [row for turn in range(repeats) if (row := done.find(**key, round=turn)) is not None]
    return {name: [row["seconds"][name] for row in rows] for name in METHODS}


def summary(label: str, times: dict[str, list[float]]) -> dict[str, Any]:
    ratio = spread([b / a for a, b in zip(times["dtr"], times["dtrp"], strict=True)])
    dtr, dtrp = (1e3 * statistics.median(times[name]) for name in METHODS)
    print(
        f"{label:22} dtr {dtr:8.1f} ms  dtrp {dtrp:8.1f} ms  ratio {ratio['median']:.3f} "
        f"[{ratio['min']:.3f}, {ratio['max']:.3f}]",
        flush=True,
    )
    return {"ratio": ratio, **{f"{name}_seconds": spread(times[name]) for name in METHODS}}


def main() -> None:
    parser = options(__doc__, repeats=9, steps=6)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ranks", action="store_true", help="also on 2 ranks")
    args = parser.parse_args()
    done = Finished(args.out / "prediction_cost.jsonl")
    found: dict[str, Any] = {}
    for name in args.only:
        for where in WHERE if args.ranks else ["inline CPU"]:
            label = name if where == "inline CPU" else f"{name} on {where}"
            found[label] = summary(f"{name}, {where}", rounds(name, where, args.repeats, args.steps, done))
    print(write("prediction_cost", {"cases": found}, args.out))
    done.over()


if __name__ == "__main__":
    main()
