"""Who trains: each system says why it cannot train a model, or builds what does a step of it on every rank.

Systems are small frozen objects that travel to the ranks. All see the same batch in every step, so their samples per
second count the same thing; clipping is left out for all alike. Whoever feeds them batches of a data set and asks for
their weights sees them learn.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UnlatchError
from ..methods import Method
from ..nn.compiled import Compilation
from ..nn.tree import Tree, batch_size, split_batch
from ..plan import Plan
from ..train import parallelize
from ..train.compile_options import read_compile
from .subject import Subject, Updates
from .timing import WARM

__all__ = ["DDP", "Independent", "Loop", "Ours", "Plain", "System", "Training", "Unsuitable"]


class Unsuitable(UnlatchError):
    """A system that cannot train this model; the message says why."""


class Training(Protocol):
    """A system at work on one rank."""

    #: Steps until its pipeline is full.
    warm: int

    def feed(self, data: tuple[Tree, Tree]) -> None:
        """Take this whole batch for the next steps; every rank is given the same one."""

    def step(self) -> None:
        """Train on one batch."""

    def flush(self) -> None:
        """Finish all batches that are under way."""

    def weights(self) -> dict[str, Tensor]:
        """Weights and buffers of the whole model by their names there; to be asked on all ranks that train."""

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True)
class System(ABC):
    """One way to train a model on ranks."""

    #: Whose it is.
    system: ClassVar[str]

    @property
    @abstractmethod
    def method(self) -> str:
        """What it does, in a word or two."""

    @property
    def threads(self) -> int:
        """Intra-op threads of each process."""
        return 1

    @property
    def cut(self) -> tuple[int, ...] | None:
        """The first block of each stage; `None` where the model is not cut, or not yet."""
        return None

    def processes(self, ranks: int) -> int:
        """How many of the ranks work."""
        return ranks

    def copies(self, ranks: int) -> int:
        """Batches that one step of all ranks trains on."""
        return 1

    def fitted(self, subject: Subject, ranks: int) -> System:
        """The same with every open choice made, by trying it in this process.

        **Raises:** an `UnlatchError` that says why the model cannot be trained so.
        """
        return self

    @abstractmethod
    def start(self, subject: Subject) -> Training | None:
        """Build it on this rank; `None` if this rank has nothing to do."""

    def __str__(self) -> str:
        return f"{self.system} {self.method}"


class Loop:
    """A plain loop over one module."""

    warm = WARM

    def __init__(
        self, subject: Subject, module: nn.Module, data: tuple[Tree, Tree], how: Compilation | None = None
    ) -> None:
        self.subject, self.module = subject, module
        self.forward = module if how is None else how.code(module)
        self.updates = Updates(subject, module)
        self.feed(data)

    def feed(self, data: tuple[Tree, Tree]) -> None:
        self.data = data

    def step(self) -> None:
        self.updates.clear()
        self.subject.loss(self.forward, *self.data).backward()  # type: ignore[no-untyped-call]
        self.updates.apply()

    def flush(self) -> None:
        pass

    def weights(self) -> dict[str, Tensor]:
        return self.module.state_dict()

    def close(self) -> None:
        pass


class _Replica(Loop):
    """A loop over one rank's share of every batch."""

    module: DistributedDataParallel

    def feed(self, data: tuple[Tree, Tree]) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        x, y = (split_batch(part, ranks)[rank] for part in data)
        self.data = x, y

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.module.module.state_dict()
        return found


@dataclass(frozen=True)
class Plain(System):
    """PyTorch in one process.

    **Arguments:** `count`: of threads; `compile`: as for `unlatch.parallelize`.
    """

    count: int = 1
    compile: bool | str | Mapping[str, Any] = False

    system = "pytorch"

    @property
    def method(self) -> str:
        return f"{self.count} thread{'s' * (self.count > 1)}{', compiled' if self.compile else ''}"

    @property
    def threads(self) -> int:
        return self.count

    def processes(self, ranks: int) -> int:
        return 1

    def start(self, subject: Subject) -> Training | None:
        if dist.get_rank() != 0:
            return None
        return Loop(subject, subject.whole(), subject.batch(), read_compile(self.compile, "cpu"))


@dataclass(frozen=True)
class Independent(System):
    """The limit: every rank trains a model of its own, and none waits for another."""

    system = "limit"

    @property
    def method(self) -> str:
        return "independent processes"

    def copies(self, ranks: int) -> int:
        return ranks

    def start(self, subject: Subject) -> Training | None:
        return Loop(subject, subject.whole(), subject.batch())


@dataclass(frozen=True)
class DDP(System):
    """torch's data parallelism: every rank has its share of the same batch."""

    system = "pytorch"

    @property
    def method(self) -> str:
        return "DDP"

    def fitted(self, subject: Subject, ranks: int) -> System:
        samples = batch_size(subject.batch()[0])
        if samples < ranks:
            raise Unsuitable(f"a batch of {samples} samples has none for some of {ranks} ranks")
        if not any(parameter.requires_grad for parameter in subject.whole().parameters()):
            raise Unsuitable("DDP takes no model without parameters to train")
        return self

    def start(self, subject: Subject) -> Training | None:
        return _Replica(subject, DistributedDataParallel(subject.whole()), subject.batch())


@dataclass(frozen=True)
class Ours(System):
    """A method of this library, one stage per rank.

    **Arguments:**

    - `chosen`: with options.
    - `plan`: where the model is cut, which `fitted` finds out.
    - `compile`: as for `unlatch.parallelize`.
    """

    chosen: Method
    plan: Plan | None = None
    compile: bool | str | Mapping[str, Any] = False

    system = "unlatch"

    @property
    def method(self) -> str:
        return f"{self.chosen.name}{', compiled' if self.compile else ''}"

    @property
    def cut(self) -> tuple[int, ...] | None:
        return tuple(self.plan.starts) if self.plan is not None else None

    def fitted(self, subject: Subject, ranks: int) -> System:
        with _quiet():
            trial = parallelize(
                subject.model(),
                self.chosen,
                stages=ranks,
                loss_fn=subject.loss_fn,
                optimizer=subject.optimizer,
                sample=subject.batch(),
                plan=self.plan,
                precision=subject.precision,
                compile=self.compile,
                device="cpu",
                distributed=False,
            )
        with trial:
            return replace(self, chosen=trial.method, plan=trial.plan)

    def start(self, subject: Subject) -> Training | None:
        return _Running(self, subject)


class _Running:
    def __init__(self, ours: Ours, subject: Subject) -> None:
        self.feed(subject.batch())
        with _quiet():
            self.run = parallelize(
                subject.model(),
                ours.chosen,
                stages=dist.get_world_size(),
                loss_fn=subject.loss_fn,
                optimizer=subject.optimizer,
                lr_scheduler=subject.lr_scheduler,
                sample=self.data,
                plan=ours.plan,
                precision=subject.precision,
                compile=ours.compile,
                # As all others here.
                device="cpu",
            )
        self.warm = WARM + -(-self.run.schedule.depth // self.run.method.per_batch)

    def feed(self, data: tuple[Tree, Tree]) -> None:
        self.data = data

    def step(self) -> None:
        self.run.step(*self.data)

    def flush(self) -> None:
        self.run.flush()

    def weights(self) -> dict[str, Tensor]:
        return self.run.module().state_dict()

    def close(self) -> None:
        with self.run:
            self.run.flush()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without advice on accuracy, which is not the question here."""
    log = logging.getLogger("unlatch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
