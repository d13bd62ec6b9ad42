"""Runs with replicas of the network, on ranks and in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unlatch
from rank_jobs import Outcome, conv_run, copied_state, momentum_sgd, train_conv
from small_nets import images, tanh_net, vectors
from unlatch.errors import UnlatchError
from unlatch.schedule import replicated


@contextmanager
def in_parts(least: int = 64) -> Iterator[None]:
    """Gradients of the smallest networks travel in parts, too."""
    before, replicated._LEAST = replicated._LEAST, least
    try:
        yield
    finally:
        replicated._LEAST = before


def train_each_in_parts(methods: tuple[str, ...], stages: int, replicas: int) -> dict[str, Outcome]:
    with in_parts():
        return train_each(methods, stages, replicas)


def train_each(methods: tuple[str, ...], stages: int, replicas: int) -> dict[str, Outcome]:
    """What must not depend on where it ran: batch norm, dropout, a short last batch, evaluations."""
    return {name: train_conv(name, stages, replicas=replicas) for name in methods}


def over_gloo(method: str, replicas: int) -> Outcome:
    with in_parts():
        return train_conv(method, 2, replicas=replicas, transport="gloo")


def smooth_run(method: Any, stages: int, **options: Any) -> unlatch.Run:
    """A network in float64 without batch norm and dropout, which replicas train as one does."""
    settings: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "optimizer": momentum_sgd,
        "split": [str(block) for block in range(1, stages)],
        "sample": vectors(1, size=12)[0],
    }
    return unlatch.parallelize(tanh_net(stages), method, stages=stages, **{**settings, **options})


def train_smooth(method: Any, stages: int, size: int = 11, **options: Any) -> Outcome:
    """Losses and weights, and those of every replica that is in this process, by station."""
    with smooth_run(method, stages, **options) as run:
        steps = [run.step(x, y) for x, y in vectors(6, size=size)] + run.flush()
        return {
            "losses": [s.loss for s in steps if s.loss is not None],
            "state": copied_state(run.module()),
            "own": own_weights(run),
        }


def train_smooth_replicas(method: Any, stages: int, replicas: int) -> Outcome:
    return train_smooth(method, stages, replicas=replicas)


def own_weights(run: unlatch.Run) -> dict[int, list[torch.Tensor]]:
    return {s.number: [p.detach().clone() for p in s.stage.params] for s in run.stations.values() if s.stage}


def fit(methods: tuple[str, ...], replicas: int) -> dict[str, Outcome]:
    """Sessions that are evaluated after every epoch, by a loader that only the first rank reads."""
    found = {}
    for name in methods:
        with conv_run(name, 2, replicas=replicas) as run:
            reads = 0 in run.stations
            epochs = unlatch.Trainer(run).fit(
                images([12, 12, 5]) if reads else None, 2, images([7, 3], seed=2) if reads else None
            )
            told = [(e.epoch, e.loss, e.samples, e.evaluation) for e in epochs]
            rows = [(row.replica, row.stage, row.rank, row.updates) for row in run.statistics()]
            found[name] = {"epochs": told, "state": copied_state(run.module()), "rows": rows}
    return found


def goes_on(run: unlatch.Run) -> Outcome:
    """Some more batches and the rest of the pipeline."""
    results = [run.step(x, y) for x, y in images([12, 9, 12], seed=4)] + run.flush()
    losses = [r.loss for r in results if r.loss is not None]
    return {"losses": losses, "state": copied_state(run.module()), "evaluation": run.evaluate(images([7], seed=2))}


def saves(method: Any, path: str, replicas: int) -> Outcome:
    """Save with batches under way, and go on."""
    with conv_run(method, 2, replicas=replicas) as run:
        for x, y in images([12, 12, 10]):
            run.step(x, y)
        run.save(path)
        return goes_on(run)


def loads(method: Any, path: str, replicas: int, **options: Any) -> Outcome:
    """Load into a run that has seen something else, and go on."""
    with conv_run(method, 2, replicas=replicas, **options) as run:
        run.step(*images([12], seed=9)[0])
        run.load(path)
        return goes_on(run)


def saves_in_parts(method: Any, path: str, replicas: int) -> Outcome:
    with in_parts():
        return saves(method, path, replicas)


def loads_in_parts(method: Any, path: str, replicas: int, **options: Any) -> Outcome:
    with in_parts():
        return loads(method, path, replicas, **options)


class MostlyUnused(nn.Module):
    """So many parameters that no batch reaches, and one layer that all do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.used = nn.Linear(5, 5).double()
        self.unused = nn.ParameterList(nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def many_without_gradient(count: int, transport: str = "auto") -> Outcome:
    torch.manual_seed(0)
    settings = {"loss_fn": nn.functional.mse_loss, "optimizer": momentum_sgd, "transport": transport}
    with unlatch.parallelize(nn.Sequential(MostlyUnused(count)), "bp", stages=1, replicas=2, **settings) as run:
        losses = [run.step(x, y).loss for x, y in vectors(3, size=8)]
        return {"losses": losses, "state": copied_state(run.module())}


def skips(method: Any, replicas: int, bad_row: int) -> Outcome:
    """One row of one batch is not finite: it belongs to some replica, and all leave the batch out."""
    with smooth_run(method, 2, replicas=replicas, nonfinite="skip") as run:
        losses = []
        for number, (x, y) in enumerate(vectors(7, size=8)):
            if number == 3:
                x = x.clone()
                x[bad_row] = float("nan")
            losses.append(run.step(x, y).loss)
        losses += [r.loss for r in run.flush()]
        return {"losses": losses, "state": copied_state(run.module()), "left_out": run.left_out}


def skips_in_parts(method: Any, replicas: int, bad_row: int) -> Outcome:
    with in_parts():
        return skips(method, replicas, bad_row)


def breaks(method: Any, stages: int, replicas: int, stage: int, folder: str) -> None:
    """The process of a station of some replica is killed; the others write down what they were told, and when."""
    faults = unlatch.Faults().kill(stage, 3)
    run = smooth_run(method, stages, replicas=replicas, faults=faults, stall_limit=60.0)
    rank, begun = run._world.rank, time.monotonic()
    try:
        with run:
            for x, y in vectors(12, size=8):
                run.step(x, y)
            run.flush()
    except UnlatchError as error:
        (Path(folder) / f"rank{rank}").write_text(f"{time.monotonic() - begun:.1f} {error}")
        raise


def refused(replicas: int) -> str:
    """What a run says that cannot be."""
    try:
        with smooth_run("bp", 2, replicas=replicas):
            return "nothing"
    except UnlatchError as error:
        return f"{type(error).__name__}: {error}"


def disagree() -> None:
    """Ranks that want different numbers of replicas."""
    import torch.distributed as dist

    with smooth_run("bp", 2, replicas=1 + dist.get_rank()):
        pass
