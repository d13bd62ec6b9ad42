"""A few small batches of the user's own data, the same in every process, and runs of the user's model on them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ...config import Config
from ...methods import Method
from ...nn.chain import StageChain, chain, cut
from ...nn.device import Device, find_device
from ...nn.parts import in_parts
from ..prepare import PreparedRun, build_model, loaders, make_run

__all__ = ["Trial", "largest_difference", "relative_difference"]

Batch = tuple[Tensor, Tensor]
_SAMPLES = 8


@dataclass(frozen=True)
class Trial:
    """What is tried: enough batches to fill the pipeline and go on for a while.

    **Arguments:** `size`: samples per batch, a multiple of the micro-batches; `count`: batches.
    """

    prepared: PreparedRun
    size: int
    count: int

    @classmethod
    def of(cls, prepared: PreparedRun) -> Trial:
        """A small trial of a run."""
        micros = prepared.method.per_batch
        size = max(micros, min(prepared.config.data.batch_size, _SAMPLES * micros) // micros * micros)
        filling = -(
            -max(prepared.method.schedule(prepared.config.run.stages).delay(0), 1) // prepared.method.per_update
        )
        # Batch compensation joins batches: it changes what a batch is, not how it is trained.
        method = prepared.method.joining(1)
        return cls(replace(prepared, method=method), size, (filling + 3) * method.accumulate)

    @property
    def config(self) -> Config:
        """The user's settings."""
        return self.prepared.config

    @property
    def method(self) -> Method:
        """The user's method, with every choice made."""
        return self.prepared.method

    @property
    def device(self) -> Device:
        """Where it is tried."""
        return find_device(self.config.run.device)

    def batches(self) -> list[Batch]:
        """The first batches of the training data, without augmentation."""
        data = self.config.data.model_copy(update={"batch_size": self.size, "augment": False, "drop_last": True})
        loader = loaders(self.config.model_copy(update={"data": data}))[0]
        return [loader.batch(i // len(loader), i % len(loader)) for i in range(self.count)]

    def model(self, double: bool = False) -> nn.Module:
        """The user's model with its initial weights."""
        model = build_model(self.config, self.prepared.model_options)
        return model.double() if double else model

    def stages(self, model: nn.Module) -> list[StageChain]:
        """The model cut as the run cuts it; shares its weights."""
        plan = self.prepared.plan
        return [StageChain(part) for part in cut(in_parts(chain(model), plan.split or ()), plan.starts)]

    def micros(self, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
        """The batches cut into micro-batches."""
        return [
            part
            for x, y in batches
            for part in zip(x.tensor_split(self.method.per_batch), y.tensor_split(self.method.per_batch), strict=True)
        ]

    def train(self, batches: Sequence[Batch] | None = None, **changes: Any) -> tuple[list[float], dict[str, Tensor]]:
        """Train on the batches. **Returns:** the losses and the final state of the model."""
        torch.set_num_threads(self.config.run.threads)
        batches = batches or self.batches()
        with make_run(self.prepared, batches[0], **changes) as run:
            steps = [run.step(x, y) for x, y in batches]
            steps += run.flush()
            state = {name: t.detach().clone() for name, t in run.module().state_dict().items()}
        return [step.loss for step in steps if step.loss is not None], state


    def timed(self, **changes: Any) -> float:
        """Seconds to train on the batches once the run is there, until all of them are through."""
        torch.set_num_threads(self.config.run.threads)
        batches = self.batches()
        with make_run(self.prepared, batches[0], **changes) as run:
            run.step(*batches[0])
            run.flush()
            begun = time.perf_counter()
            for x, y in batches:
                run.step(x, y)
            run.flush()
            return time.perf_counter() - begun


def train_on_rank(trial: Trial, transport: str) -> tuple[list[float], bytes]:
    """`Trial.train` on ranks, with the result in a form that travels. **Arguments:** `transport`: of messages."""
    losses, state = trial.train(transport=transport)
    return losses, save({name: t.contiguous() for name, t in state.items()})


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of two states and where it is; 0.0 only if they agree bit for bit.

    >>> largest_difference({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 0.5])})
    (0.5, 'w')
    """
    worst, where = 0.0, ""
    for name, t in one.items():
        if not torch.equal(t, other[name]):
            difference = float((t.double() - other[name].double()).abs().max())
            # Not equal, though no number differs: a NaN on either side.
            difference = difference if difference > 0.0 else float("inf")
            worst, where = max((worst, where), (difference, name))
    return worst, where


def relative_difference(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """The distance of two lists of tensors over the norm of the true one.

    >>> relative_difference([torch.tensor([1.0])], [torch.tensor([2.0])])
    0.5
    """
    pairs = list(zip(found, true, strict=True))
    distance = math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))
    norm = math.sqrt(sum(float(b.double().square().sum()) for _, b in pairs))
    return distance / norm if norm > 0 else distance
