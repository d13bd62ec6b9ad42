"""What accuracy benchmarks share: one training run, and a file of finished runs so that a study can be resumed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from common import RESULTS, Finished
from torch import nn
from torch.nn.functional import cross_entropy

import unlatch
from unlatch.data import Loader, TensorData


def decay_weights_only(params: Iterable[nn.Parameter], *, lr: float, decay: float, nesterov: bool) -> torch.optim.SGD:
    """SGD that leaves biases and normalisation alone, as is usual for residual networks."""
    matrices, others = [], []
    for p in params:
        (matrices if p.dim() > 1 else others).append(p)
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.SGD([g for g in groups if g["params"]], lr=lr, momentum=0.9, nesterov=nesterov)


def triangle(step: int, *, total: int, warmup: float) -> float:
    """Linear warm-up, then linear decay to zero."""
    rise = max(1, int(warmup * total))
    return min((step + 1) / rise, max(0.0, (total - step) / (total - rise)))


def triangular(optimizer: torch.optim.Optimizer, *, total: int, warmup: float = 0.2) -> Any:
    """The learning-rate schedule of every accuracy benchmark."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, partial(triangle, total=total, warmup=warmup))


def train(
    build: Callable[[], nn.Module],
    method: Any,
    data: tuple[TensorData, TensorData],
    *,
    stages: int,
    seed: int,
    epochs: int,
    batch_size: int,
    lr: float,
    decay: float = 5e-4,
    nesterov: bool = True,
    precision: str = "fp32",
    split: Any = "auto",
    augment: bool = True,
    channels_last: bool = True,
    messages: str = "exact",
) -> dict[str, float]:
    """One run, inline. **Returns:** test accuracy in percent, final training loss, seconds."""
    torch.set_num_threads(1)
    training, test = data
    loader = Loader(
        training, batch_size, shuffle=True, seed=seed, augment=augment, drop_last=True, channels_last=channels_last
    )
    torch.manual_seed(seed)
    model = build()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    start = time.perf_counter()
    with unlatch.parallelize(
        model,
        method,
        stages=stages,
        loss_fn=cross_entropy,
        optimizer=partial(decay_weights_only, lr=lr, decay=decay, nesterov=nesterov),
        lr_scheduler=partial(triangular, total=epochs * len(loader)),
        split=split,
        sample=loader.batch(0, 0),
        precision=precision,
        messages=messages,
        seed=seed,
    ) as run:
        history = unlatch.Trainer(run).fit(loader, epochs)
        found = run.evaluate(Loader(test, 500, channels_last=channels_last))
        microbatches = run.method.microbatches
    return {
        "accuracy": 100.0 * found["accuracy"],
        "loss": history[-1].loss,
        "microbatches": microbatches,
        "seconds": time.perf_counter() - start,
    }


class Study(Finished):
    """Runs by key, each finished one a line of a file; what is there is not run again."""

    def __init__(self, name: str) -> None:
        super().__init__(RESULTS / f"{name}.jsonl")

    def run(self, key: Mapping[str, Any], work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Do the work unless it was done, and show what came of it."""
        known = len(self.rows)
        row = self.once(work, **key)
        if len(self.rows) > known:
            print(json.dumps(row), flush=True)
        return row

    def summary(self, group: tuple[str, ...], reference: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Mean and spread for each group over the seeds that the reference has too, and its distance to that, paired.

        A group without such a seed is left out.
        """
        base = {r["seed"]: r["accuracy"] for r in self.rows if all(r.get(k) == v for k, v in reference.items())}
        groups: dict[tuple[Any, ...], dict[int, float]] = {}
        for row in self.rows:
            if row["seed"] in base:
                groups.setdefault(tuple(row.get(g) for g in group), {})[row["seed"]] = row["accuracy"]
        return [
            {
                **dict(zip(group, key, strict=True)),
                "seeds": len(values),
                "mean": statistics.mean(values.values()),
                "spread": max(values.values()) - min(values.values()),
                "difference": statistics.mean(value - base[seed] for seed, value in values.items()),
            }
            for key, values in groups.items()
        ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Aligned columns."""
    names = list(rows[0])
    cells = [[f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(n), *(len(c[i]) for c in cells)) for i, n in enumerate(names)]
    for line in [names, *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
