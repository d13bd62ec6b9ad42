"""Claim: on 2 ranks with one thread each (batch 128 of images or 16 of text, fp32), pipedream, fdg and layerpipe train
at least 0.95 times as fast as two independent processes do together, dtr and dtrp at least 1.575 times as fast as
one-thread BP (0.90 of 1.75, since they run one stage's forward twice), zb-h1 at least 1.1 times as fast as the best of
torch.distributed.pipelining, and the best of ours at least 1.3 times; on ResNet-20 and on a GPT of 10 M parameters. On
a RevNet, petra trains at least 1.7 times as fast as BP.

Reached, medians of 5 rounds in the committed result files, on a machine where two independent processes do 1.83 times
the work of one. ResNet-20: fdg 0.95 of two processes, pipedream 0.93, layerpipe 0.88; dtr 1.41, dtrp 1.45, where the
same share of what this machine gives would be 1.44; zb-h1 1.15 times torch's best (its zero bubble with 2
micro-batches), fdg 1.32 times. The GPT (1.91): fdg 1.02 of two processes, pipedream and layerpipe 1.00; dtr 1.61, dtrp
1.62; zb-h1 1.00 times torch's best (its zero bubble with 4 micro-batches), fdg 1.13 times. RevNet-20:
petra 1.68, on another machine.

    python benchmarks/pipeline_speed.py [--model resnet20 | gpt | revnet20] [--repeats 7] [--steps 12] [--only fdg dtr]

Measurements are lines of a file beside the result until all are done, so that a run that was stopped can be taken up.
With all systems the GPT takes 4 minutes a round; `--model gpt --repeats 5 --steps 4 --microbatches 4 8` takes about 9
minutes on an idle machine.

The claim is about the steady state: pipelines of asynchronous methods are full, and only the time in which all ranks
are at work counts. Synchronous methods empty their pipeline in every step, within their time. Rounds are interleaved:
every round measures every system for a few steps. This is `unlatch bench throughput` for fixed models.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from common import Finished, options, write
from torch import nn
from torch.nn.functional import cross_entropy

from unlatch.methods import get
from unlatch.models import build
from unlatch.models.gpt import next_token_loss
from unlatch.throughput import Row, Subject, compare, draw, everybody

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True)
METHODS = ("bp", "1f1b", "zb-h1", "pipedream", "layerpipe", "fdg", "dtr", "dtrp")
TEXT, CONTEXT = 16, 128


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (128,), generator=generator)


def model(name: str = "resnet20") -> nn.Module:
    torch.manual_seed(0)
    return build(name).to(memory_format=torch.channels_last)


def text() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(65, (TEXT, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return build("gpt", context=CONTEXT, depth=6, width=384, heads=6)


SUBJECT = Subject(model, batch, cross_entropy, SGD)
CASES: dict[str, tuple[Subject, tuple[str, ...]]] = {
    "resnet20": (SUBJECT, METHODS),
    "gpt": (Subject(gpt, text, next_token_loss, SGD), METHODS),
    "revnet20": (Subject(partial(model, "revnet20"), batch, cross_entropy, SGD), ("bp", "1f1b", "petra")),
}


def ratio_of(row: Row) -> dict[str, Any]:
    assert row.spread is not None
    return {"median": row.ratio, "min": row.spread[0], "max": row.spread[1], "repeats": row.rounds}


def main() -> None:
    parser = options(__doc__, repeats=7, steps=12)
    parser.add_argument("--model", choices=list(CASES), default="resnet20")
    parser.add_argument("--only", nargs="*", help="methods of ours")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8], help="of torch's pipelines")
    args = parser.parse_args()
    subject, methods = CASES[args.model]
    systems = everybody(subject, 2, [get(name) for name in args.only or methods], args.microbatches)
    name = "pipeline_speed" if args.model == "resnet20" else f"pipeline_speed_{args.model}"
    done = Finished(args.out / f"{name}.jsonl")
    rows = compare(
        subject, systems, 2, rounds=args.repeats, steps=args.steps, say=partial(print, flush=True), results=done
    )
    print(f"{'system':34} {'samples/s':>10} {'ratio':>6}  {'range':16} {'of limit':>8}  cut")
    for row in rows:
        if row.spread is None:
            print(f"{row.system + ' ' + row.method:34} {row.reason}")
            continue
        span = f"[{row.spread[0]:.3f}, {row.spread[1]:.3f}]"
        print(
            f"{row.system + ' ' + row.method:34} {row.samples_per_s:10.1f} {row.ratio:6.3f}  {span:16} "
            f"{row.limit:8.3f}  {row.starts or ''}"
        )
    result = {
        "ratio": {f"{row.system} {row.method}": ratio_of(row) for row in rows if row.spread is not None},
        "rows": [row.as_dict() for row in rows],
    }
    path = write(name, result, args.out)
    draw(rows, f"{args.model}, 2 ranks").savefig(path.with_suffix(".png"), dpi=130)
    done.over()
    print(path)


if __name__ == "__main__":
    main()
