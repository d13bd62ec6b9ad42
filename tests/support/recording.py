"""Optimizers and modules that write down what the engine does with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import unlatch
from unlatch.transport.mail import Mail, Message


class RecordingSGD(SGD):
    """SGD that keeps every gradient it is given and the weights it was given for."""

    def __init__(self, params: list[nn.Parameter], **options: Any) -> None:
        super().__init__(params, **options)
        self.gradients: list[list[Tensor]] = []
        self.weights: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.gradients.append([p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in params])
        self.weights.append([p.detach().clone() for p in params])
        super().step(closure)


class Scripted(Optimizer):
    """Moves along a straight line whatever the gradient: W <- W + u. Keeps the gradients."""

    def __init__(self, params: list[nn.Parameter], seed: int = 7, scale: float = 0.02) -> None:
        super().__init__(params, {"lr": 1.0})
        generator = torch.Generator().manual_seed(seed)
        self.u = [scale * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]
        self.gradients: list[list[Tensor]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        self.gradients.append([p.grad.clone() for p in params])
        torch._foreach_add_(params, self.u)


class Optimizers:
    """A factory that keeps what it made, in the order of the stages."""

    def __init__(self, kind: Any, **options: Any) -> None:
        self.kind, self.options = kind, options
        self.made: list[Any] = []

    def __call__(self, params: list[nn.Parameter]) -> Any:
        self.made.append(self.kind(params, **self.options))
        return self.made[-1]

    def __getitem__(self, stage: int) -> Any:
        return self.made[stage]

    def __len__(self) -> int:
        return len(self.made)


class Forwards:
    """The outputs of a module's forwards, those without and those with a graph, in order."""

    def __init__(self, module: nn.Module) -> None:
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.inputs: list[Tensor] = []
        module.register_forward_hook(self._seen)

    def _seen(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        if module.training:
            (self.second if torch.is_grad_enabled() else self.first).append(output.detach().clone())
            if torch.is_grad_enabled():
                self.inputs.append(inputs[0].detach().clone())

    def lateness(self) -> list[float]:
        """Largest change of an output between the two forwards of each batch."""
        return [(a - b).abs().max().item() for a, b in zip(self.first, self.second, strict=True)]


def stages_of(run: unlatch.Run) -> list[Any]:
    """The stages of this process, in order."""
    return [station.stage for station in run.stations.values() if station.stage is not None]


@contextmanager
def listening() -> Iterator[list[Message]]:
    """All messages that stations send from now on, in order."""
    found: list[Message] = []
    send = Mail.send

    def listen(mail: Mail, message: Message) -> None:
        found.append(message)
        send(mail, message)

    with patch.object(Mail, "send", listen):
        yield found


@contextmanager
def taking() -> Iterator[list[Message]]:
    """All messages that stations take up from now on, in order."""
    found: list[Message] = []
    take = Mail.take

    def listen(mail: Mail, *args: Any) -> Message:
        found.append(take(mail, *args))
        return found[-1]

    with patch.object(Mail, "take", listen):
        yield found


@contextmanager
def waiting() -> Iterator[list[Message]]:
    """The messages that wait to be taken, of those that are posted from now on."""
    found: list[Message] = []
    post, take = Mail.post, Mail.take

    def posted(mail: Mail, message: Message) -> None:
        found.append(message)
        post(mail, message)

    def taken(mail: Mail, *args: Any) -> Message:
        message = take(mail, *args)
        found[:] = [other for other in found if other is not message]
        return message

    with patch.object(Mail, "post", posted), patch.object(Mail, "take", taken):
        yield found


def feed(run: unlatch.Run, data: list[Any]) -> list[unlatch.StepResult]:
    """Step through the data and empty the pipeline; the results of finished batches."""
    return [r for r in _results(run, data) if r.batch is not None]


def _results(run: unlatch.Run, data: list[Any]) -> Iterator[unlatch.StepResult]:
    for x, y in data:
        yield run.step(x, y)
    yield from run.flush()
