"""A small split network in float64 with everything known: true activations, true adjoints, and inputs set by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unlatch
from recording import Optimizers, RecordingSGD
from unlatch.methods import AuxNet

DIM, BATCH, CLASSES, STAGES = 6, 5, 3, 4
SPLIT = ["2", "4", "6"]


class Residual(nn.Module):
    """A smooth residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return out


def residual_net(seed: int = 0) -> nn.Sequential:
    """Eight residual blocks and a linear head; `SPLIT` makes four stages of it."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Residual() for _ in range(8)), nn.Linear(DIM, CLASSES)).double()


def stages_of_net(net: nn.Sequential) -> list[nn.Sequential]:
    return [net[0:2], net[2:4], net[4:6], net[6:9]]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(BATCH, DIM, generator=generator, dtype=torch.float64),
        torch.randint(CLASSES, (BATCH,), generator=generator),
    )


def truth(net: nn.Sequential, x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """True inputs of stages 1.., their adjoints, and the gradients of backpropagation by stage."""
    stages, states = stages_of_net(net), []
    h = x
    for stage in stages[:-1]:
        h = stage(h)
        states.append(h)
    loss = cross_entropy(stages[-1](h), y)
    params = [p for stage in stages for p in stage.parameters()]
    found = torch.autograd.grad(loss, [*states, *params])
    rest = iter(found[len(states) :])
    by_stage = [[next(rest) for _ in stage.parameters()] for stage in stages]
    return [s.detach() for s in states], list(found[: len(states)]), by_stage


class Fixed(nn.Module):
    """An AuxNet whose output is its parameter: the gradient of the auxiliary variable can be read off."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class Bench:
    """A run whose weights stand still, with auxiliary variables and multipliers set by hand.

    **Arguments:** `lam`, `kappa`: by border, 1 to 3; without `kappa` the penalty form.
    """

    def __init__(
        self, net: nn.Sequential, lam: list[Tensor], kappa: list[Tensor] | None = None, **options: Any
    ) -> None:
        self.stages, self.aux = Optimizers(RecordingSGD, lr=0.0), Optimizers(RecordingSGD, lr=0.0)
        multiplier: Callable[..., Tensor] | None = None if kappa is None else lambda border, x, y: kappa[border - 1]
        method = AuxNet(
            form="penalty" if kappa is None else "lagrangian",
            multiplier=multiplier,
            factory=lambda border: Fixed(lam[border.stage - 1]),
            aux_optimizer=self.aux,
            **{"pull": 1.0, "imitate": 1.0, "kappa_input": 1.0, "units": "sum", "border_norm": False, **options},
        )
        x, y = batch()
        self.run = unlatch.parallelize(
            net,
            method,
            stages=STAGES,
            loss_fn=cross_entropy,
            optimizer=self.stages,
            split=SPLIT,
            sample=(x, y),
        )
        self.run.step(x, y)

    def weight_gradients(self) -> list[list[Tensor]]:
        return [optimizer.gradients[-1] for optimizer in self.stages.made]

    def input_gradients(self) -> list[Tensor]:
        return [optimizer.gradients[-1][0] for optimizer in self.aux.made]


def random_like(tensors: list[Tensor], seed: int = 5, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]
