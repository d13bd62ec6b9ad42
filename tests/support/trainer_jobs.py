"""Sessions that are cut short and continued, alone and on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import unlatch
from unlatch.data.loader import Loader
from unlatch.data.tensors import TensorData
from unlatch.methods import get

#: Methods with batches under way, and options that leave something half done at a boundary.
SESSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bp": ("bp", {}),
    "1f1b": ("1f1b", {"microbatches": 2, "accumulate": 3}),
    "pipedream": ("pipedream", {"microbatches": 1}),
    "dtrp": ("dtrp", {"accumulate": 2, "microbatches": 2}),
    "dtrp joined": ("dtrp", {"compensate": 2}),
    "layerpipe": ("layerpipe", {"mode": "stages", "microbatches": 1}),
    "auxnet": ("auxnet", {}),
    "auxvar": ("auxvar", {}),
    "dgl": ("dgl", {}),
}
EPOCHS, SAMPLES, BATCH = 3, 44, 8


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 6, generator=generator)


def torch_loader() -> Any:
    """Shuffles by the global random numbers, as most loaders do."""
    return DataLoader(TensorDataset(*tensors()), batch_size=BATCH, shuffle=True)


def own_loader() -> Any:
    x, y = tensors()
    return Loader(TensorData(x, y, classes=6), batch_size=BATCH, shuffle=True, seed=4)


LOADERS = {"torch": torch_loader, "own": own_loader}


class Noise(nn.Module):
    """Random numbers that nobody but the global generator knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * torch.rand_like(x) if self.training else x


def begun(case: str, noise: bool = False) -> unlatch.Run:
    name, options = SESSIONS[case]
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
    if noise:
        blocks.insert(0, Noise())
    return unlatch.parallelize(
        nn.Sequential(*blocks),
        get(name, **options),
        stages=2,
        loss_fn=mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        lr_scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.7),
        split=["2"],
        sample=(torch.zeros(BATCH, 6), torch.zeros(BATCH, 6)),
    )


Result = tuple[list[tuple[int, float, int]], list[torch.Tensor]]


def result(run: unlatch.Run, history: list[unlatch.Epoch]) -> Result:
    beside = [p for s in run.stations.values() for one in s.trained().values() for p in one.module.parameters()]
    weights = [t.detach().clone() for t in (*run.module().state_dict().values(), *beside)]
    return [(e.epoch, e.loss, e.samples) for e in history], weights


def undisturbed(case: str, loader: str = "torch", noise: bool = False) -> Result:
    with begun(case, noise) as run:
        torch.manual_seed(7)
        reads = run.method.reads_on_every_rank or 0 in run.stations
        return result(run, unlatch.Trainer(run).fit(LOADERS[loader]() if reads else None, EPOCHS))


def countdown(batches: int) -> Iterator[bool]:
    yield from [False] * batches
    while True:
        yield True


def interrupted(case: str, folder: str, stops: list[int], loader: str = "torch", noise: bool = False) -> Result:
    """The same in several sessions, each with everything built anew and ended after so many batches."""
    history = []
    for number, stop in enumerate([*stops, 10**6]):
        with begun(case, noise) as run:
            torch.manual_seed(7 if number == 0 else 1000 + number)
            reads = run.method.reads_on_every_rank or 0 in run.stations
            trainer = unlatch.Trainer(run, Path(folder))
            assert trainer.resume() == (number > 0)
            source = LOADERS[loader]() if reads else None
            history += trainer.fit(source, until=EPOCHS, stop=partial(next, countdown(stop)))
            if number == len(stops):
                return result(run, history)
            trainer.save()
    raise AssertionError("the last session goes on to the end")


def same(one: Result, other: Result) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def differing(folder: str, stops: list[int]) -> list[str]:
    """Cases that do not end as if they had never been stopped, on the ranks of this process group."""
    found = []
    for case in SESSIONS:
        if not same(undisturbed(case), interrupted(case, str(Path(folder, case)), stops)):
            found.append(case)
    return found


def saved_beside(case: str, folder: str, every: str) -> Result:
    """A session that writes checkpoints while it trains."""
    with begun(case) as run:
        torch.manual_seed(7)
        reads = run.method.reads_on_every_rank or 0 in run.stations
        trainer = unlatch.Trainer(run, unlatch.Checkpoints(folder, keep_last=100), save_every=every)
        return result(run, trainer.fit(torch_loader() if reads else None, EPOCHS))


def continued_from(case: str, path: str) -> Result:
    """The rest of a session from one of its checkpoints."""
    with begun(case) as run:
        reads = run.method.reads_on_every_rank or 0 in run.stations
        trainer = unlatch.Trainer(run)
        trainer.load(path)
        return result(run, trainer.fit(torch_loader() if reads else None, until=EPOCHS))


def all_of_one(case: str, folder: str, every: str) -> list[str]:
    """Checkpoints that lead elsewhere than the session that wrote them, on the ranks of this process group."""
    expected = saved_beside(case, folder, every)
    wrong = [] if same(undisturbed(case), expected) else ["saving changes the session"]
    for path in sorted(Path(folder).glob("step-*")):
        found = continued_from(case, str(path))
        if not all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True)):
            wrong.append(path.name)
        if found[0] != expected[0][len(expected[0]) - len(found[0]) :]:
            wrong.append(f"{path.name}: {found[0]} instead of {expected[0]}")
    return wrong
