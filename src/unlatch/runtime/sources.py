"""Where a stage's predicted input comes from: a network that is trained beside the stage, or a table of samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..methods.border import BorderMethod
from ..nn.auxiliary import Capacity
from ..nn.randomness import replayable
from ..nn.ranged import Ranged
from ..rules.border import corrected
from .border_records import Meeting
from .jobs import Job
from .precision import autocast
from .stage import StageOptions
from .trained import Trained
from .worker import Worker

__all__ = ["AuxNetSource", "Shortcut", "Source"]

# Keeps the random numbers of an AuxNet apart from those of its stage, whose stream is (seed, stage, micro).
_STREAM = 1 << 32


class Source(ABC):
    """Makes predicted inputs and learns from what became of them."""

    #: How large it is against what it stands for, if it is a network.
    capacity: Capacity | None = None
    #: Whether the sources of all stages are one network, whose gradients must be added up before an update.
    shared = False

    def __init__(self, method: BorderMethod) -> None:
        self.method = method
        self.rule = method.border_rule()

    @abstractmethod
    def predict(self, job: Job, *, keep: bool) -> Tensor:
        """The input of the stage for this micro-batch, detached; `keep` what the correction will need."""

    @abstractmethod
    def correct(self, job: Job, meeting: Meeting) -> None:
        """Learn from a micro-batch."""

    @abstractmethod
    def distil(self, job: Job, x: Tensor) -> None:
        """Learn from the state of a serial pass alone."""

    def multiplier(self, job: Job) -> Tensor | None:
        """The multiplier of this micro-batch, where it is kept here."""
        return None

    def update(self, batches: int) -> None:  # noqa: B027 - most have nothing to do here
        """Apply what was learned over `batches` batches."""

    def reduce(self, worker: Worker) -> None:  # noqa: B027 - most have nothing to do here
        """Add the gradients from above to one's own and pass the sum down."""

    def spread(self, worker: Worker) -> None:  # noqa: B027 - most have nothing to do here
        """Take over the complete sums from below and pass them up."""

    def evaluate(self, x: Any) -> Tensor:
        """The predicted input for data that is only evaluated."""
        raise ConfigError(f"{self.method.name} stores inputs of known samples and cannot predict those of new ones")

    def trained(self) -> dict[str, Trained]:
        """What is trained here, by name."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What is stored here and belongs into a checkpoint."""
        return {}

    def load_tensors(self, found: dict[str, Tensor]) -> None:  # noqa: B027 - most have nothing to do here
        """Take over what `tensors` returned."""

    def jump(self, meeting: Meeting) -> Tensor:
        """The gradient in the predicted input of everything it is meant to lower."""
        method = self.method
        adjoint = 0.0 if method.ablation == "no-adjoint" else method.adjoint
        total = torch.zeros_like(meeting.lam)
        if meeting.p is not None and adjoint:
            total = total + adjoint * meeting.p
        if meeting.kappa is not None and method.kappa_input:
            total = total - method.kappa_input * meeting.kappa
        if meeting.x is not None and method.imitate:
            total = total + (meeting.beta * method.imitate) * self.rule.gradient(meeting.lam, meeting.x)
        return total


class AuxNetSource(Source):
    """A network from raw data to the stage's input.

    **Arguments:**

    - `net`: the network with its optimizer; its module is a `Ranged`.
    - `stage`: whose input it predicts.
    """

    def __init__(
        self, method: BorderMethod, net: Trained, stage: int, options: StageOptions, capacity: Capacity | None
    ) -> None:
        super().__init__(method)
        self.net = net
        self.capacity = capacity
        self.explicit = getattr(method, "correction", "chain-rule") == "explicit"
        self._fits: int = getattr(method, "aux_steps", 1)
        self._stage = stage
        self._options = options
        self._kept: dict[int, Tensor] = {}

    @property
    def module(self) -> Ranged:
        assert isinstance(self.net.module, Ranged)
        return self.net.module

    def evaluate(self, x: Any) -> Tensor:
        # The output is normalised with the statistics of its own batch, in training as here.
        self.module.eval()
        try:
            with torch.no_grad():
                found: Tensor = self.module(x)
                return found
        finally:
            self.module.train()

    def _run(self, job: Job) -> Tensor:
        options = self._options
        with replayable(options.seed, self._stage + _STREAM, job.micro.id), autocast(options.precision):
            found: Tensor = self.module(job.x)
            return found

    def predict(self, job: Job, *, keep: bool) -> Tensor:
        if not keep:
            with torch.no_grad():
                return self._run(job)
        out = self._kept[job.micro.id] = self._run(job)
        return out.detach()

    def correct(self, job: Job, meeting: Meeting) -> None:
        out = self._kept.pop(job.micro.id, None)
        if out is None:
            # Fitted one iteration after use: the prediction is made again at the newest weights.
            out = self._run(job)
            meeting = Meeting(out.detach(), meeting.x, meeting.p, meeting.kappa, meeting.beta)
        jump = self.jump(meeting)
        if self.explicit and meeting.x is not None:
            self._fit(job, out, meeting, jump)
        else:
            self._backward(out, jump)
        if meeting.x is not None:
            self.module.observe(meeting.x)

    def _fit(self, job: Job, out: Tensor, meeting: Meeting, jump: Tensor) -> None:
        """Correct the auxiliary variable, then fit the network to it, in the units of the Lagrangian."""
        weight, stiffness = meeting.beta * self.method.imitate, self.rule.stiffness(meeting.lam)
        aim = corrected(meeting.lam, jump, self.method.theta, weight, stiffness)
        for left in range(self._fits, 0, -1):
            self._backward(out, (out.detach() - aim) * (weight * stiffness / self.method.theta))
            if left > 1:
                # Several fits are one update of the run, as far as its learning rate is concerned.
                self.net.update(schedule=False)
                out = self._run(job)

    def distil(self, job: Job, x: Tensor) -> None:
        out = self._run(job)
        self._backward(out, self.rule.gradient(out, self.rule.filter(x)) * job.micro.scale)
        self.module.observe(x)

    def _backward(self, out: Tensor, cotangent: Tensor) -> None:
        if out.requires_grad:
            torch.autograd.backward([out], [cotangent.to(out.dtype)])

    def update(self, batches: int) -> None:
        self.net.update(batches)

    def trained(self) -> dict[str, Trained]:
        return {"auxnet": self.net}


class Shortcut:
    """The short way through the network, for evaluation: raw data, predicted input of the last stage, last stage."""

    def __init__(self, stage: Any, source: Source | None) -> None:
        self._stage, self._source = stage, source

    def through(self, stage: Any) -> Shortcut:
        """The same way, with something else that has `last` and `evaluate` in place of the stage."""
        return Shortcut(stage, self._source)

    def evaluate(self, inputs: Any) -> Any:
        """Hand raw data on, or at the last stage use it."""
        if not self._stage.last or self._source is None:
            return self._stage.evaluate(inputs) if self._stage.last else inputs
        return self._stage.evaluate(self._source.evaluate(inputs))
