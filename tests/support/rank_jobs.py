"""What tests run on ranks. Ranks are fresh interpreters, so these are importable functions with picklable arguments."""

from __future__ import annotations

import resource
import threading
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import unlatch
from small_nets import CONV_SPLITS, conv_net, images, on_plain_nets, tanh_net, vectors

Outcome = dict[str, Any]
#: What a stage may hold of a batch.
TENSORS, PAGES = 24, 1024


def falling(update: int) -> float:
    """A learning rate that changes at every update."""
    return 1.0 / (1.0 + 0.1 * update)


def momentum_sgd(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def plain_sgd(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def falling_lr(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, falling)


def copied_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def conv_run(method: Any, stages: int, **options: Any) -> unlatch.Run:
    """A run of `conv_net` with everything switched on: momentum, decay, lr schedule, clipping."""
    settings: dict[str, Any] = {
        "loss_fn": nn.functional.cross_entropy,
        "optimizer": momentum_sgd,
        "lr_scheduler": falling_lr,
        "clip_grad_norm": 0.5,
        "split": CONV_SPLITS[stages],
        "sample": images([12])[0],
        "seed": 3,
    }
    return unlatch.parallelize(conv_net(), on_plain_nets(method, stages), stages=stages, **{**settings, **options})


def train_conv(method: Any, stages: int, sizes: tuple[int, ...] = (12, 12, 12, 5), **options: Any) -> Outcome:
    """Train on these batches and tell everything that must not depend on where it ran."""
    data, held_out = images(list(sizes)), images([7, 7, 3], seed=2)
    with conv_run(method, stages, **options) as run:
        evaluations = [run.evaluate(held_out)]
        steps = []
        for number, (x, y) in enumerate(data):
            steps.append(run.step(x, y))
            if number == 1:
                evaluations.append(run.evaluate(held_out))
        steps += run.flush()
        evaluations.append(run.evaluate(held_out))
        state = copied_state(run.module())
    return {"steps": [(s.step, s.batch, s.loss) for s in steps], "evaluations": evaluations, "state": state}


def train_conv_each(method: str, stage_counts: tuple[int, ...]) -> dict[int, Outcome]:
    return {stages: train_conv(method, stages) for stages in stage_counts}


def train_conv_over(transport: str, methods: tuple[str, ...]) -> tuple[dict[str, Outcome], set[str]]:
    """By method what comes of it, and what the threads of this rank are called meanwhile."""
    threads: set[str] = set()
    found = {}
    for name in methods:
        with conv_run(name, 2, transport=transport) as run:
            run.step(*images([12])[0])
            threads |= {thread.name for thread in threading.enumerate()}
        found[name] = train_conv(name, 2, transport=transport)
    return found, threads


def train_conv_by_whole_norm(methods: tuple[str, ...], stages: int) -> dict[str, Outcome]:
    """Gradients limited by the norm of the whole model's, with an accumulation that the end leaves incomplete."""
    return {
        name: train_conv(unlatch.methods.get(name, accumulate=3), stages, clip_norm_of="model", clip_grad_norm=0.05)
        for name in methods
    }


def fit_with_rates_per_epoch(methods: tuple[str, ...]) -> dict[str, Outcome]:
    """Sessions whose learning rate halves when an epoch ends, and batches stay under way."""
    found = {}
    for name in methods:
        halving = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
        with conv_run(name, 3, lr_scheduler=halving, lr_scheduler_per="epoch") as run:
            epochs = unlatch.Trainer(run).fit(images([12, 12, 5]), 3)
            found[name] = {"losses": [epoch.loss for epoch in epochs], "state": copied_state(run.module())}
    return found


class Slow(nn.Module):
    """Lets others run ahead as far as they can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return x


def train_with_a_slow_stage(method: Any, batches: int) -> list[float | None]:
    """Losses of four stages, the second of which is slow."""
    model = tanh_net(4)
    model[1].append(Slow())
    settings = {"loss_fn": nn.functional.mse_loss, "optimizer": plain_sgd, "split": ["1", "2", "3"]}
    with unlatch.parallelize(model, method, stages=4, sample=vectors(1)[0], **settings) as run:
        return [r.loss for r in [run.step(x, y) for x, y in vectors(batches)] + run.flush()]


def train_on_own_data(method: Any) -> None:
    """Every rank makes its own batches; from the second batch on they differ."""
    import torch.distributed as dist

    with conv_run(method, 2) as run:
        for number, (x, y) in enumerate(images([12, 12, 12])):
            run.step(x + (1e-3 * dist.get_rank() if number else 0.0), y)


def leave_early(method: Any) -> None:
    """Rank 1 takes part in one batch and leaves; rank 0 expects it for another."""
    import torch.distributed as dist

    with conv_run(method, 2) as run:
        for x, y in images([12, 12])[: 2 - dist.get_rank()]:
            run.step(x, y)


def fit_conv(method: Any) -> Outcome:
    """Two epochs with evaluation, and what the method measured."""
    data, held_out = images([12, 12, 5]), images([7, 3], seed=2)
    with conv_run(method, 2) as run:
        epochs = [(e.epoch, e.loss, e.samples, e.evaluation) for e in unlatch.Trainer(run).fit(data, 2, held_out)]
        violations = [[r.violation for r in s.records] for s in run.method_statistics()]
    return {"epochs": epochs, "violations": violations}


def fit_uneven(method: Any, batches: tuple[int, ...]) -> None:
    """Every rank has a loader of its own, and they differ in length."""
    import torch.distributed as dist

    with conv_run(method, 2) as run:
        unlatch.Trainer(run).fit(images([12] * batches[dist.get_rank()]), 1)


def fit_stopped(method: Any, after: int) -> Outcome:
    """Every rank has a loader of its own; only the first one is asked whether to stop."""
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > after

    with conv_run(method, 2) as run:
        trainer = unlatch.Trainer(run)
        epochs = len(trainer.fit(images([12, 12, 12, 5]), 2, stop=stop))
        return {"epochs": epochs, "samples_into_epoch": trainer.samples_into_epoch, "state": copied_state(run.module())}


def save_conv(method: Any, path: str) -> None:
    with conv_run(method, 2) as run:
        for x, y in images([12, 12, 12]):
            run.step(x, y)
        run.save(path)


def resume_conv(method: Any, path: str) -> Outcome:
    with conv_run(method, 2) as run:
        run.load(path)
        steps = [run.step(x, y) for x, y in images([12, 5], seed=4)] + run.flush()
        state = copied_state(run.module())
    return {"steps": [(s.step, s.batch, s.loss) for s in steps], "state": state}


def differences(one: Outcome, other: Outcome) -> list[str]:
    """What is not the same, bit for bit."""
    found = [key for key in one if key != "state" and one[key] != other[key]]
    states = one["state"], other["state"]
    if states[0].keys() != states[1].keys():
        found.append("names of the state")
    found += [name for name, t in states[0].items() if not torch.equal(t, states[1][name])]
    return found


def faults_of_a_batch() -> int:
    """Page faults of allocating, writing and freeing what a stage may hold, once that has been done before."""

    def batch() -> None:
        held = [torch.empty(PAGES * 4096, dtype=torch.uint8).fill_(1) for _ in range(TENSORS)]
        held.clear()

    batch()
    batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
