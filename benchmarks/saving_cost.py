"""Claim: a run on 2 ranks that writes an exact checkpoint every 50 batches loses at most 5 % of its speed, about what
a checkpoint costs that empties the pipeline first. Its file is larger by what is under way.

    python benchmarks/saving_cost.py [--repeats 5] [--steps 50] [--batch 64]

ResNet-20 on 2 ranks with one thread each. Rounds are interleaved: 50 batches without a checkpoint, with an exact one
(in the middle, written while training goes on), and with one that empties the pipeline first. Time is that of the whole
round, the checkpoint on disk included. Bytes are those of the folder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import interleave, options, spread, write
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.methods import get
from unlatch.models import build

TARGET = 1.05
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
#: Name, method, model: petra needs a reversible one.
METHODS = {
    "bp": ("bp", {}, "resnet20"),
    "1f1b x4": ("1f1b", {"microbatches": 4}, "resnet20"),
    "pipedream": ("pipedream", {}, "resnet20"),
    "dtrp": ("dtrp", {}, "resnet20"),
    "petra": ("petra", {}, "revnet20"),
    "layerpipe": ("layerpipe", {"mode": "stages"}, "resnet20"),
    "auxnet": ("auxnet", {}, "resnet20"),
}


def measure(name: str, steps: int, size: int, repeats: int, folder: str) -> dict[str, Any]:
    """On every rank: seconds of each kind of round, and bytes of both kinds of checkpoint."""
    method, chosen, model = METHODS[name]
    generator = torch.Generator().manual_seed(0)
    data = (
        torch.randn(size, 3, 32, 32, generator=generator).to(memory_format=torch.channels_last),
        torch.randint(10, (size,), generator=generator),
    )
    torch.manual_seed(0)
    network = build(model, classes=10).to(memory_format=torch.channels_last)
    run = unlatch.parallelize(
        network, get(method, **chosen), stages=2, loss_fn=cross_entropy, optimizer=SGD, sample=data
    )
    paths = {kind: Path(folder, kind) for kind in ("exact", "drained")}

    def timed(save: Callable[[], Any]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for number in range(steps):
            run.step(*data)
            if number == steps // 2:
                save()
        run.finish_saving()
        dist.barrier()
        return time.perf_counter() - start

    kinds = {
        "none": partial(timed, lambda: None),
        "exact": partial(timed, lambda: run.save(paths["exact"], wait=False)),
        "drained": partial(timed, lambda: run.save(paths["drained"], exact=False)),
    }
    for first in kinds.values():
        first()
    found = interleave(kinds, repeats)
    sizes = {kind: sum(f.stat().st_size for f in path.iterdir()) for kind, path in paths.items()}
    run.close()
    return {"seconds": found, "bytes": sizes}


def main() -> None:
    parser = options(__doc__, repeats=5, steps=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    with unlatch.Ranks(2) as ranks:
        for name in args.methods:
            with tempfile.TemporaryDirectory() as folder:
                found = ranks.run(measure, name, args.steps, args.batch, args.repeats, folder)[0]
            none = found["seconds"]["none"]
            ratios = {
                kind: spread([a / b for a, b in zip(found["seconds"][kind], none, strict=True)])
                for kind in ("exact", "drained")
            }
            rows[name] = {**ratios, "seconds": spread(none), "bytes": found["bytes"]}
            exact, drained = (found["bytes"][kind] / 1e6 for kind in ("exact", "drained"))
            medians = [ratios[kind]["median"] for kind in ("exact", "drained")]
            print(f"{name:10} time {medians[0]:.3f} exact, {medians[1]:.3f} drained; ", end="")
            print(f"{exact:.1f} and {drained:.1f} MB", flush=True)
    result = {
        "target": TARGET,
        "methods": rows,
        "settings": {name: value for name, value in vars(args).items() if name != "out"},
    }
    write("saving_cost", result, args.out)


if __name__ == "__main__":
    main()
